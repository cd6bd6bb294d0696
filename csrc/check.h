// Checks of the arguments from Python. Arguments that could make a kernel access memory out of bounds raise the typed
// errors of the package.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "problem.h"

namespace ringweave {

namespace nb = nanobind;
typedef nb::ndarray<nb::device::cpu> Array;
typedef nb::ndarray<nb::ro, nb::device::cpu> ReadArray;  // also one that may not be written

// An error of the class `kind` in ringweave.errors; module.cpp raises it in Python.
struct Refusal : std::runtime_error {
  const char *kind;
  Refusal(const char *kind, const std::string &text) : std::runtime_error(text), kind(kind) {}
};

[[noreturn]] inline void refuse(const std::string &name, const std::string &why, const char *kind = "ShapeError") {
  throw Refusal(kind, name + ": " + why);
}

inline std::string shape_text(std::initializer_list<int64_t> shape) {
  std::string text = "(";
  for (int64_t n : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(n);
  return text + ")";
}

inline void check_shape(const char *name, const Array &a, std::initializer_list<int64_t> shape) {
  bool same = a.ndim() == shape.size();
  size_t i = 0;
  for (int64_t n : shape) same = same && (int64_t)a.shape(i++) == n;
  if (same) return;
  std::string got = "(";
  for (size_t j = 0; j < a.ndim(); ++j) got += (j ? ", " : "") + std::to_string(a.shape(j));
  refuse(name, "got shape " + got + "), wanted " + shape_text(shape));
}

// Accepts 8-bit types only for keys and values that are `stored` with scales; E4M3 is passed as unsigned integers.
inline Dtype dtype_of(const char *name, const Array &a, bool stored = false) {
  const nb::dlpack::dtype t = a.dtype();
  const bool one = t.lanes == 1;
  if (one && t.code == (uint8_t)nb::dlpack::dtype_code::Float && t.bits == 32) return F32;
  if (one && t.code == (uint8_t)nb::dlpack::dtype_code::Float && t.bits == 16) return F16;
  if (one && t.code == (uint8_t)nb::dlpack::dtype_code::Bfloat && t.bits == 16) return BF16;
  if (stored && one && t.code == (uint8_t)nb::dlpack::dtype_code::Int && t.bits == 8) return I8;
  if (stored && one && t.code == (uint8_t)nb::dlpack::dtype_code::UInt && t.bits == 8) return E4M3;
  refuse(name, std::string("wanted float32, bfloat16 or float16") + (stored ? ", or 8 bits" : ""));
}

// A (batch, head, token[, channel]) tensor as a view.
inline View view_of(const char *name, const Array &a, std::initializer_list<int64_t> shape, bool written,
                    bool stored = false) {
  check_shape(name, a, shape);
  View v;
  v.dtype = dtype_of(name, a, stored);
  if (shape.size() == 4 && a.stride(3) != 1)
    refuse(name, "wanted stride 1 in the last dimension, got " + std::to_string(a.stride(3)));
  for (size_t i = 0; written && i < a.ndim(); ++i)
    if (a.stride(i) == 0 && a.shape(i) > 1) refuse(name, "is written, so it may not repeat elements (stride 0)");
  const int64_t size = bytes_of(v.dtype);
  v.data = (char *)a.data();
  v.batch = a.stride(0) * size, v.head = a.stride(1) * size, v.token = a.stride(2) * size;
  return v;
}

inline void same_dtype(const char *name, Dtype got, Dtype wanted) {
  if (got != wanted) refuse(name, "wanted the dtype of q");
}

template <class A>
void check_compact(const char *name, const A &a) {
  int64_t expected = 1;
  for (size_t j = a.ndim(); j-- > 0; expected *= (int64_t)a.shape(j))
    if (a.shape(j) > 1 && a.stride(j) != expected && a.size() > 0) refuse(name, "wanted a contiguous array");
}

// The data of a contiguous array of integers; -1 in the shape accepts any size.
template <class Int = int32_t, class A>
const Int *ints(const char *name, const A &a, std::initializer_list<int64_t> shape) {
  const nb::dlpack::dtype t = a.dtype();
  constexpr auto code = std::is_signed<Int>::value ? nb::dlpack::dtype_code::Int : nb::dlpack::dtype_code::UInt;
  if (t.lanes != 1 || t.code != (uint8_t)code || t.bits != 8 * sizeof(Int))
    refuse(name, std::string("wanted ") + (std::is_signed<Int>::value ? "int" : "uint") + std::to_string(8 * sizeof(Int)));
  if (a.ndim() != shape.size())
    refuse(name, "wanted " + std::to_string(shape.size()) + " dimensions, got " + std::to_string(a.ndim()));
  size_t i = 0;
  for (int64_t n : shape) {
    if (n >= 0 && (int64_t)a.shape(i) != n)
      refuse(name, "size of dimension " + std::to_string(i) + " is " + std::to_string(a.shape(i)) + ", wanted " +
                       std::to_string(n));
    ++i;
  }
  check_compact(name, a);
  return (const Int *)a.data();
}

// Whether the values ascend strictly, without duplicates.
inline bool ascends(const int32_t *x, int64_t n) {
  bool falls = false;
  for (int64_t i = 1; i < n; ++i) falls |= x[i] <= x[i - 1];
  return !falls;
}

// Checks that every element is in [low, high).
template <class Int>
void check_range(const char *name, const Int *x, int64_t n, int64_t low, int64_t high) {
  Int least = std::numeric_limits<Int>::max(), most = std::numeric_limits<Int>::min();
  for (int64_t i = 0; i < n; ++i) {
    least = x[i] < least ? x[i] : least;
    most = x[i] > most ? x[i] : most;
  }
  if (n > 0 && (least < low || most >= high))
    refuse(name, "has values in [" + std::to_string(least) + ", " + std::to_string(most) + "], wanted [" +
                     std::to_string(low) + ", " + std::to_string(high - 1) + "]");
}

// Checks `row_sets` lists of offsets: each ascends, and all offsets are in [0, nnz].
inline void check_offsets(const char *name, const int32_t *x, int64_t row_sets, int64_t n, int64_t nnz) {
  check_range(name, x, row_sets * n, 0, nnz + 1);
  for (int64_t g = 0; g < row_sets; ++g) {
    bool falls = false;
    for (int64_t i = 1; i < n; ++i) falls |= x[g * n + i] < x[g * n + i - 1];
    if (falls) refuse(name, "offsets of row set " + std::to_string(g) + " descend");
  }
}

// Checks that lists ascend, since backward finds a part of a column by bisection, and that row sets share no entries,
// since backward numbers them.
inline void check_columns(const int32_t *row, const int32_t *offsets, int64_t row_sets, int64_t n) {
  bool falls = false;
  for (int64_t g = 0; g < row_sets; ++g, offsets += n) {
    if (g && offsets[0] < offsets[-1])
      refuse("col_ptr", "row sets " + std::to_string(g - 1) + " and " + std::to_string(g) + " overlap");
    for (int64_t i = 0; i + 1 < n; ++i)
      for (int64_t e = offsets[i] + 1; e < offsets[i + 1]; ++e) falls |= row[e] <= row[e - 1];
  }
  if (falls) refuse("row", "a list does not ascend");
}

}  // namespace ringweave
