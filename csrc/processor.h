// Which instruction sets the processor has.
#pragma once
#include <vector>

namespace ringweave {

// The builds that this processor can run, by name, the best first.
std::vector<const char *> instruction_sets();

}  // namespace ringweave
