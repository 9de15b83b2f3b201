// Reads what Python passes as a buffer: the protocols in one table, chosen by the object's type.
//
//   DeviceView                   ours, read as it is
//   int                          an address; nothing else is known of it
//   __dlpack_c_exchange_api__    DLPack's table of C functions, on the type
//   __dlpack__                   a capsule, with a version or without
//   __cuda_array_interface__     on CUDA
//   __array_interface__          on the CPU; also where __dlpack__ refuses, as numpy's does for ml_dtypes
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <string>

#include "ffi/buffer_view.h"
#include "program_spec.h"

namespace cudnn_jax {

// What has to live until a call is done: the objects that were passed and the capsules that they gave.
// Released with the GIL held, each once.
class Held {
 public:
  Held() = default;
  ~Held();
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  void object(PyObject* object);  // takes a reference
  void managed(dlpack::Managed* managed) { add(Kind::kManaged, managed); }
  void managed(dlpack::ManagedVersioned* managed) { add(Kind::kVersioned, managed); }

 private:
  enum class Kind { kObject, kManaged, kVersioned };
  struct Item {
    Kind kind;
    void* what;
  };
  void add(Kind kind, void* what) { items_[count_++] = {kind, what}; }

  // The objects and at most one capsule of each of the operands and the workspace.
  std::array<Item, 2 * (kMaxOperands + 1)> items_;  // only the first `count_` are written
  size_t count_ = 0;
};

// Reads the buffers of one call that runs at `place`.
class BufferReader {
 public:
  BufferReader(const Place& place, Held& held) : place_(place), held_(held) {}
  BufferReader(const BufferReader&) = delete;
  BufferReader& operator=(const BufferReader&) = delete;

  // `label` names the operand in errors. What `view` points at lives as long as `held`, but the shape and
  // strides of some only until Python runs again. Makes place.stream wait for the producer's where that is
  // another one.
  void read(PyObject* object, const std::string& label, BufferView& view);

 private:
  struct TypeEntry;
  static TypeEntry entry_of(PyObject* object);
  static std::array<TypeEntry, 16>& cached();
  static void remember(const TypeEntry& entry);

  void by_exchange(PyObject* object, const dlpack::Exchange& exchange, const std::string& label,
                   BufferView& view);
  void by_capsule(PyObject* object, TypeEntry entry, const std::string& label, BufferView& view);
  bool by_interface(PyObject* object, const std::string& label, BufferView& view);
  PyObject* call_dlpack(PyObject* object, const TypeEntry& entry);
  void take_capsule(PyObject* capsule, const std::string& label, BufferView& view);
  void wait_for(void* stream);
  bool on_cuda() const { return place_.platform == Platform::kCuda; }

  const Place place_;
  Held& held_;
  nanobind::object stream_;                    // what __dlpack__ is told, once made
  const dlpack::Exchange* ordered_ = nullptr;  // the producer whose stream was asked for last
};

}  // namespace cudnn_jax
