// Scratch arrays, taken sequentially from one block. With a null block, `at` measures the size.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace ringweave {
namespace {

struct Carve {
  char *at;
  template <class T>
  T *take(size_t n) {
    char *p = at;
    at += (n * sizeof(T) + 127) / 64 * 64;  // at least a cache line between arrays
    return reinterpret_cast<T *>(p);
  }
};

}  // namespace
}  // namespace ringweave
