// What csrc/module.cpp uses of nanobind, for a program instead of an extension: it reads calls from its input and writes
// what became of them, so that the binding and the kernels run on a processor that is only emulated, without Python.
// The other side is tests/native/emulated.py.
//
// A call is a name and a list of arguments. A function that takes its arguments by name gets one: a list of pairs of a
// name and a value. A value begins with its kind: n(one), i(nteger), f(loat), s(tring), l(ist), t(ensor).
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
struct ro {};
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

// A value of any kind.
struct object {
  char kind = 'n';
  int64_t number = 0;
  double real = 0;
  std::string text;
  std::vector<object> items;
  ndarray<> tensor;
  object attr(const char *) const { return {}; }
  void *ptr() const { return nullptr; }
};

struct handle {
  const object *of = nullptr;
  handle() = default;
  handle(const object &x) : of(&x) {}
  bool is_none() const { return !of || of->kind == 'n'; }
};
inline handle none() { return {}; }

struct kwargs {
  std::map<std::string, object> named;
  size_t size() const { return named.size(); }
  auto begin() const { return named.begin(); }
  auto end() const { return named.end(); }
};

inline bool try_cast(const object &x, int64_t &to) { return to = x.number, x.kind == 'i'; }
inline bool try_cast(const object &x, int &to) { return to = (int)x.number, x.kind == 'i'; }
inline bool try_cast(const object &x, bool &to) { return to = x.number != 0, x.kind == 'i'; }
inline bool try_cast(const object &x, std::string &to) { return to = x.text, x.kind == 's'; }
inline bool try_cast(const object &x, float &to) {
  return to = x.kind == 'f' ? (float)x.real : (float)x.number, x.kind == 'f' || x.kind == 'i';
}
template <class... Ts>
bool try_cast(const object &x, ndarray<Ts...> &to) {
  to.dtype_ = x.tensor.dtype_, to.shape_ = x.tensor.shape_, to.strides_ = x.tensor.strides_, to.data_ = x.tensor.data_;
  return x.kind == 't';
}
template <class T>
bool try_cast(const object &x, std::optional<T> &to) {
  return x.kind == 'n' || try_cast(x, to.emplace());
}
template <class T>
bool try_cast(const object &x, std::vector<T> &to) {
  to.resize(x.items.size());
  bool all = x.kind == 'l';
  for (size_t i = 0; i < to.size(); ++i) all = all && try_cast(x.items[i], to[i]);
  return all;
}
template <class... Ts>
bool try_cast(const object &x, std::tuple<Ts...> &to) {
  size_t i = 0;
  return x.items.size() == sizeof...(Ts) &&
         std::apply([&](auto &...each) { return (try_cast(x.items[i++], each) && ...); }, to);
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

  object value() {
    object x;
    x.kind = kind();
    switch (x.kind) {
      case 'n': break;
      case 'i': x.number = raw<int64_t>(); break;
      case 'f': x.real = raw<double>(); break;
      case 's': x.text = text(); break;
      case 't': tensor(x.tensor); break;
      case 'l':
        x.items.resize(raw<uint32_t>());
        for (object &each : x.items) each = value();
        break;
      default: broken(std::string("unknown kind ") + x.kind);
    }
    return x;
  }

  std::vector<Memory> memory;

 private:
  static void bytes(void *to, size_t n) {
    if (std::fread(to, 1, n, stdin) != n) broken("it ends early");
  }
  void tensor(ndarray<> &x) {
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
template <class T>
T cast(const std::string &x) {
  return x.c_str();
}
template <class... Ts>
struct init {};

template <class T>
bool try_cast(handle x, T &to) {
  return try_cast(*x.of, to);
}

inline bool try_cast(const object &x, kwargs &to) {
  for (const object &pair : x.items) to.named[pair.items[0].text] = pair.items[1];
  return x.kind == 'l';
}

class module_ {
 public:
  static object import_(const char *) { return {}; }
  std::string &doc() { return doc_; }
  std::string &attr(const char *name) { return attributes_[name]; }
  template <class R, class... Args, class... Extra>
  void def(const char *name, R (*function)(Args...), Extra &&...) {
    calls[name] = [function](Call &call) -> std::string {
      std::tuple<std::decay_t<Args>...> args;
      if (!try_cast(call.value(), args)) broken("wrong arguments");
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
  std::map<std::string, std::string> attributes_;
  std::map<std::string, std::function<std::string(Call &)>> calls;
};

template <class T>
struct class_ {
  class_(module_ &, const char *, const char *) {}
  template <class... Ts>
  class_ &def(Ts &&...) {
    return *this;
  }
  template <class... Ts>
  class_ &def_static(Ts &&...) {
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
