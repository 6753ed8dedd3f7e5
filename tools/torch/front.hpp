// What the front remembers of a function's calls, and how it reads the arguments of one.
#pragma once

#include "host.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace flashjit::torch {

constexpr std::size_t kMostParameters = 64, kMostCaptured = 16, kMostKeyWords = 512, kMostWords = 1024,
                      kMostResults = 8;

/// How an argument counts.
enum Kind : char {
  kTensor = 't',    // its layout is part of the key; None is, too
  kSaved = 's',     // likewise, and known not to be a negative view
  kMemory = 'm',    // likewise, for a result, which the call then returns
  kValue = 'v',     // None, bool, int, float, str and tuples of these are part of the key
  kProgram = 'p',   // a text is part of the key; of other programs their form is, and what they capture
  kLists = 'l',     // tile lists: what they are for is part of the key; None is, too
  kCaptures = 'c',  // a dict of tensors, whose layouts are part of the key, and of numbers
  kDefault = 'd',   // the very object that Python's signature has, or the call is left to Python
  kIgnored = 'i',   // has no effect
};

struct Key {
  std::array<uint64_t, kMostKeyWords> words;
  std::size_t count = 0;

  bool add(uint64_t word) {
    if (count == words.size()) return false;
    words[count++] = word;
    return true;
  }
  std::string_view bytes() const {
    return {reinterpret_cast<const char*>(words.data()), count * sizeof(uint64_t)};
  }
};

struct Hash {
  using is_transparent = void;
  std::size_t operator()(std::string_view key) const { return XXH3_64bits(key.data(), key.size()); }
};

/// From where among a call's Arguments::data to where among a launch's words.
struct Input {
  std::size_t place, word;
};

/// One of a call's results: the caller's memory, or memory that is allocated, or None.
struct Result {
  std::size_t parameter;  // where it is the caller's
  bool given;
  std::size_t word;
  Ref size, stride, type;  // None: so is the result
};

/// A launch as it was, but for its pointers.
struct Launch {
  Ref owner;    // of what the words point to
  Ref runtime;  // whose generation says whether the workspace is still large enough
  long generation = 0;
  uint64_t function = 0;  // 0: nothing is launched, for measurements
  uint64_t runtime_address = 0, spec = 0;
  int device_index = -1;        // negative on the CPU, where the function is the reference
  std::vector<uint64_t> words;  // of the struct, and of its captures behind it
  std::size_t captures_pointer = 0, captures_words = 0;  // where one is and points to; 0: no captures
  std::vector<Input> inputs;
  std::vector<Result> results;
  bool as_tuple = false;
  std::size_t workspace_word = 0;
  Ref workspace_size, workspace_stride, workspace_type;  // no size: none is allocated
};

/// Under a key: how to launch, or a Python function that is given the tensors, and before them what was
/// launched or None, or that Python does it.
struct Record {
  Launch launch;
  Ref function;
  std::vector<Py_ssize_t> places;  // of the function's arguments among the tensors; negative: None
  Ref form;                        // of the programs, whose address is part of the key
  bool is_refused = false;

  bool launches() const { return launch.owner.get() != nullptr; }
};

/// Shared, because a call's allocations may collect garbage, and so may change the records while one is in
/// use.
using Records = std::unordered_map<std::string, std::shared_ptr<const Record>, Hash, std::equal_to<>>;

struct Front {
  const Host* host = nullptr;
  std::string kinds;
  std::vector<Ref> names, defaults;  // of parameters; no default: null
  Ref program_of;                    // given the programs: (form, names, tensors, scalars), or None
  bool asks_all = true;              // of PyTorch: see Host::mood()
  std::size_t most_records = 0;
  std::vector<uint64_t> seen;  // hashes of keys that were met once, each at its remainder
  Records records;
};

/// A call's arguments: its key, and the addresses of its tensors and lists, first the parameters' and then
/// the ones that programs capture.
struct Arguments {
  Key key;
  std::array<uint64_t, kMostParameters + kMostCaptured> data;
  std::array<PyObject*, kMostCaptured> names, captured;  // borrowed from the arguments and from `program`
  std::size_t captured_count = 0;
  Ref program;  // what program_of() returned
};

/// One argument for each parameter.
using Given = std::array<PyObject*, kMostParameters>;

enum class Reading { done, not_plain, failed };

/// As Python would find them. False where Python would not, and where one is missing. The second: of a tuple,
/// and a dict or null.
bool place_arguments(const Front& front, PyObject* const* args, Py_ssize_t count, PyObject* names,
                     Given& given);
bool place_arguments(const Front& front, PyObject* args, PyObject* named, Given& given);

/// failed: a Python exception is set.
Reading read_arguments(const Front& front, PyObject* const* args, Arguments& found);

/// The results; NotImplemented where Python has to do it; None where it has to do it and remember it anew;
/// null with an exception.
PyObject* run(const Host& host, const Launch& launch, PyObject* const* args, const Arguments& found);

PyObject* not_implemented();

/// The result of a call; None where it is to be remembered, NotImplemented where Python does it; null with an
/// exception.
PyObject* call_of(Front& front, PyObject* const* args);
/// Whether a call is neither to be remembered nor Python's.
bool is_done(const Ref& found);

struct ModuleState {
  Host host;
  PyTypeObject* front_type = nullptr;  // borrowed from the module
};
/// Null where the object is no front.
Front* front_of(const ModuleState& module, PyObject* object);

/// The two passes of flashjit._autograd's function: (ctx, call, made, q, k, v, others ...) and (ctx, dout,
/// dlse).
PyObject* recorded_forward(PyObject* module, PyObject* const* args, Py_ssize_t count);
PyObject* recorded_backward(PyObject* module, PyObject* const* args, Py_ssize_t count);

}  // namespace flashjit::torch
