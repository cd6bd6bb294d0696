// Which instruction sets the processor has.
#pragma once
#include <vector>

namespace ringweave {

// The builds that this processor can run, by name, the best first. A build with unknown speed (AMX) is never the first.
std::vector<const char *> instruction_sets();

}  // namespace ringweave
