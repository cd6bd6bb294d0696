// What this build was made of.
#pragma once

namespace ringweave {

extern const char *const kVersion;  // of the package
extern const char *const kSources;  // a digest of the files in this folder: see CMakeLists.txt

}  // namespace ringweave
