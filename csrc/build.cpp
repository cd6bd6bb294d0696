// A file of its own, so that a change of another one compiles only these lines anew.
#include "build.h"

namespace ringweave {

const char *const kVersion = RINGWEAVE_VERSION;
const char *const kSources = RINGWEAVE_SOURCES;

}  // namespace ringweave
