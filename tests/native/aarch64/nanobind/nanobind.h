// What csrc/module.cpp uses of nanobind, for a program instead of an extension: it reads calls from its input and writes
// what became of them, so that the binding and the kernels run on a processor that is only emulated, without Python.
// The other side is tests/native/emulated.py.
//
// A call is a name and a list. A value begins with its kind: n(one), i(nteger), f(loat), s(tring), l(ist), t(ensor).
// The answer is 'v' and the value as text, then the bytes of every tensor; or 'e' and the message of an error.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace nanobind {

namespace device {
struct cpu {};
}
namespace dlpack {
struct dtype {
  uint8_t code, bits;
  uint16_t lanes;
};
enum class dtype_code : uint8_t { Int = 0, UInt = 1, Float = 2, Bfloat = 4 };
}  // namespace dlpack

// A tensor's elements end at a page that nobody may touch: reading on ends the program.
struct Memory {
  char *pages, *data;
  size_t room, bytes;
};

template <class... Ts>
class ndarray {
 public:
  size_t ndim() const { return shape_.size(); }
  size_t shape(size_t i) const { return (size_t)shape_[i]; }
  int64_t stride(size_t i) const { return strides_[i]; }
  void *data() const { return data_; }
  dlpack::dtype dtype() const { return dtype_; }
  size_t size() const {
    size_t n = 1;
    for (int64_t s : shape_) n *= (size_t)s;
    return n;
  }
  dlpack::dtype dtype_{};
  std::vector<int64_t> shape_, strides_;
  char *data_ = nullptr;
};

[[noreturn]] inline void broken(const std::string &what) {
  std::fprintf(stderr, "the call is broken: %s\n", what.c_str());
  std::exit(3);
}

class Call {
 public:
  ~Call() {
    for (Memory &m : memory) munmap(m.pages, m.room);
  }
  template <class T>
  T raw() {
    T x;
    bytes(&x, sizeof x);
    return x;
  }
  std::string text() {
    std::string s(raw<uint32_t>(), ' ');
    bytes(s.data(), s.size());
    return s;
  }
  char kind() { return raw<char>(); }
  void expect(char wanted) {
    if (char got = kind(); got != wanted) broken(std::string("wanted ") + wanted + ", got " + got);
  }

  void read(int64_t &x) { expect('i'), x = raw<int64_t>(); }
  void read(int &x) { expect('i'), x = (int)raw<int64_t>(); }
  void read(bool &x) { expect('i'), x = raw<int64_t>() != 0; }
  void read(std::string &x) { expect('s'), x = text(); }
  void read(float &x) {
    const char got = kind();
    if (got != 'f' && got != 'i') broken("wanted a number");
    x = got == 'f' ? (float)raw<double>() : (float)raw<int64_t>();
  }
  void read(double &x) { expect('f'), x = raw<double>(); }
  template <class... Ts>
  void read(ndarray<Ts...> &x) {
    expect('t'), tensor(x);
  }
  template <class T>
  void read(std::optional<T> &x) {
    const char got = kind();
    if (got == 'n') return;
    if (got != 't') broken("wanted a tensor or None");
    tensor(x.emplace());
  }
  template <class T>
  void read(std::vector<T> &x) {
    expect('l'), x.resize(raw<uint32_t>());
    for (T &each : x) read(each);
  }
  template <class... Ts>
  void read(std::tuple<Ts...> &x) {
    expect('l');
    if (raw<uint32_t>() != sizeof...(Ts)) broken("wanted a tuple of another length");
    std::apply([this](auto &...each) { (read(each), ...); }, x);
  }

  std::vector<Memory> memory;

 private:
  static void bytes(void *to, size_t n) {
    if (std::fread(to, 1, n, stdin) != n) broken("it ends early");
  }
  template <class... Ts>
  void tensor(ndarray<Ts...> &x) {
    x.dtype_ = {raw<uint8_t>(), raw<uint8_t>(), 1};
    x.shape_.resize(raw<uint8_t>()), x.strides_.resize(x.shape_.size());
    for (int64_t &n : x.shape_) n = raw<int64_t>();
    for (int64_t &n : x.strides_) n = raw<int64_t>();
    const size_t size = raw<uint64_t>(), page = (size_t)sysconf(_SC_PAGESIZE), used = (size + page - 1) / page * page;
    void *pages = mmap(nullptr, used + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED || mprotect((char *)pages + used, page, PROT_NONE)) broken("no memory");
    x.data_ = (char *)pages + used - size;
    memory.push_back({(char *)pages, x.data_, used + page, size});
    bytes(x.data_, size);
  }
};

inline std::string text_of(bool x) { return x ? "True" : "False"; }
inline std::string text_of(double x) { return std::to_string(x); }
inline std::string text_of(uint64_t x) { return std::to_string(x); }
inline std::string text_of(const std::vector<std::string> &names) {
  std::string text = "[";
  for (const std::string &name : names) text += "'" + name + "',";
  return text + "]";
}

struct none {};
struct arg {
  template <class T>
  arg &operator=(T &&) {
    return *this;
  }
  arg &none() { return *this; }
};
namespace literals {
inline arg operator""_a(const char *, size_t) { return {}; }
}  // namespace literals
struct gil_scoped_release {
  gil_scoped_release() {}
};
inline void set_leak_warnings(bool) {}

// Calls that are prepared take addresses, which mean nothing here: they compile, and nobody calls them.
struct tuple {
  size_t size() const { return 0; }
  int operator[](size_t) const { return 0; }
};
template <class T>
T cast(int x) {
  return x;
}
template <class... Ts>
struct init {};

struct object {
  object attr(const char *) const { return {}; }
  void *ptr() const { return nullptr; }
};
class module_ {
 public:
  static object import_(const char *) { return {}; }
  std::string &doc() { return doc_; }
  template <class R, class... Args, class... Extra>
  void def(const char *name, R (*function)(Args...), Extra &&...) {
    calls[name] = [function](Call &call) -> std::string {
      std::tuple<std::decay_t<Args>...> args;
      call.read(args);
      if constexpr (std::is_void_v<R>)
        return std::apply(function, args), "None";
      else
        return text_of(std::apply(function, args));
    };
  }
  int run() {
    std::setvbuf(stdout, nullptr, _IOFBF, 1 << 16);
    for (int c; (c = std::getchar()) != EOF;) {
      std::ungetc(c, stdin);
      Call call;
      const std::string name = call.text();
      if (!calls.count(name)) broken("no function " + name);
      std::string result;
      char kind = 'v';
      try {
        result = calls[name](call);
      } catch (const std::runtime_error &error) {
        kind = 'e', result = error.what();
      }
      std::putchar(kind);
      const uint32_t size = (uint32_t)result.size();
      std::fwrite(&size, sizeof size, 1, stdout), std::fwrite(result.data(), 1, size, stdout);
      for (const Memory &m : call.memory)
        if (kind == 'v') std::fwrite(m.data, 1, m.bytes, stdout);
      std::fflush(stdout);
    }
    return 0;
  }

 private:
  std::string doc_;
  std::map<std::string, std::function<std::string(Call &)>> calls;
};

template <class T>
struct class_ {
  class_(module_ &, const char *, const char *) {}
  template <class... Ts>
  class_ &def(Ts &&...) {
    return *this;
  }
};

// Only Python would call it.
template <class F>
void register_exception_translator(F &&) {}

}  // namespace nanobind
inline void PyErr_SetString(void *, const char *) {}

#define NB_MODULE(name, m)                  \
  static void define(nanobind::module_ &m); \
  int main() {                              \
    nanobind::module_ m;                    \
    define(m);                              \
    return m.run();                         \
  }                                         \
  static void define(nanobind::module_ &m)
