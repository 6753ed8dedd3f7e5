#include <algorithm>

#include "front.hpp"

namespace flashjit::torch {

namespace {

using Launcher = int (*)(void* runtime, void* spec, void* args, void* stream);
using Reference = int (*)(void* spec, void* args);

int launch_on_stream(const Launch& launch, void* words, void* stream) {
  int status = 0;
  PyThreadState* state = PyEval_SaveThread();
  void* spec = reinterpret_cast<void*>(launch.spec);
  if (launch.function == 0) {
    status = 0;
  } else if (launch.device_index < 0) {
    status = reinterpret_cast<Reference>(launch.function)(spec, words);
  } else {
    status = reinterpret_cast<Launcher>(launch.function)(reinterpret_cast<void*>(launch.runtime_address),
                                                         spec, words, stream);
  }
  PyEval_RestoreThread(state);
  return status;
}

/// The address of memory that was just made; 0 with an exception.
bool add_made(const Host& host, const Ref& made, uint64_t& word) {
  Tensor tensor;
  if (!made) return false;
  if (!host.read(made.get(), tensor)) {
    PyErr_SetString(PyExc_RuntimeError, "flashjit: a new tensor has no memory");
    return false;
  }
  word = reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset;
  return true;
}

}  // namespace

PyObject* not_implemented() { return Ref::borrowed(Py_NotImplemented).release(); }

PyObject* run(const Host& host, const Launch& launch, PyObject* const* args, const Arguments& found) {
  const bool on_gpu = launch.device_index >= 0;
  void* stream = nullptr;
  if (on_gpu && !host.is_current(launch.device_index)) return not_implemented();
  if (on_gpu && !host.stream(launch.device_index, stream)) return nullptr;
  const long generation = host.generation(launch.runtime.get());
  if (generation != launch.generation) return generation < 0 ? nullptr : Ref::borrowed(Py_None).release();
  std::array<uint64_t, kMostWords> words;
  std::copy(launch.words.begin(), launch.words.end(), words.begin());
  for (const Input& input : launch.inputs) words[input.word] = found.data[input.place];
  if (launch.captures_words != 0)
    words[launch.captures_pointer] = reinterpret_cast<uint64_t>(&words[launch.captures_words]);
  std::array<Ref, kMostResults> results;
  const std::size_t count = launch.results.size();
  for (std::size_t i = 0; i < count; i++) {
    const Result& result = launch.results[i];
    if (result.given || result.size.get() == Py_None) {
      results[i] = Ref::borrowed(result.given ? args[result.parameter] : Py_None);
      continue;
    }
    results[i] = host.allocate(on_gpu, result.size.get(), result.stride.get(), result.type.get());
    if (!add_made(host, results[i], words[result.word])) return nullptr;
  }
  Ref workspace;
  if (launch.workspace_size) {
    workspace = host.allocate(on_gpu, launch.workspace_size.get(), launch.workspace_stride.get(),
                              launch.workspace_type.get());
    if (!add_made(host, workspace, words[launch.workspace_word])) return nullptr;
  }
  if (launch_on_stream(launch, words.data(), stream) != 0) return not_implemented();
  if (!launch.as_tuple) return results[0].release();
  Ref tuple(PyTuple_New(static_cast<Py_ssize_t>(count)));
  for (std::size_t i = 0; tuple && i < count; i++) {
    PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(i), results[i].release());
  }
  return tuple.release();
}

}  // namespace flashjit::torch
