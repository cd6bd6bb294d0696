// Scratch arrays, taken sequentially from one block. With a null block, `at` measures the size.
//
// In a guarded build (see scripts/sanitize.sh), AddressSanitizer reports every access between two arrays, and new arrays
// hold numbers that no result may contain: floats are NaN, and integers are far out of range.
#pragma once
#include "vec.h"
#if defined(RINGWEAVE_GUARDED)
#include <sanitizer/asan_interface.h>

#include <type_traits>
#endif

namespace ringweave {
namespace {

struct Carve {
  char *at;
  const bool measures;
  explicit Carve(char *block) : at(block), measures(!block) {}
  template <class T>
  T *take(size_t n) {
    char *p = at;
    at += (n * sizeof(T) + 127) / 64 * 64;  // at least a cache line between arrays
#if defined(RINGWEAVE_GUARDED)
    if (!measures) {
      char *const end = p + n * sizeof(T);
      ASAN_UNPOISON_MEMORY_REGION(p, (size_t)(at - p));
      memset(p, std::is_integral<T>::value && sizeof(T) > 1 ? 0x7f : 0xff, n * sizeof(T));
      ASAN_POISON_MEMORY_REGION(end, (size_t)(at - end));
    }
#endif
    return reinterpret_cast<T *>(p);
  }
};

// An array with one element for each lane (or for each row or key, where these are lanes). Kernels load whole vectors,
// in a view from any lane on, and so up to W - 1 elements after the last lane. This type has room for them, and `fill`
// writes them.
template <class T>
class PerLane {
  T *data = nullptr;

 public:
  PerLane() = default;
  PerLane(Carve &m, size_t most) : data(m.take<T>(most ? most + W : 0)) {}
  operator T *() const { return data; }
  // Writes of(i) for each of n lanes, and for the W elements after them.
  template <class F>
  RW_INLINE void fill(int n, F of) const {
    for (int i = 0; i < n + W; ++i) data[i] = of(i);
  }
};

}  // namespace
}  // namespace ringweave
