// A buffer that a caller of graph.execute passed, in one form, whatever protocol it came by.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "ffi/dlpack_abi.h"
#include "ffi/step.h"

namespace cudnn_jax {

// Where a call runs, and on which stream.
struct Place {
  Platform platform = Platform::kCpu;
  int device = kNoDevice;
  void* stream = nullptr;

  bool takes(const dlpack::Device& device) const;
  std::string describe() const;  // "cpu", "cuda:0"
};

std::string describe(const dlpack::Device& device);

inline constexpr int64_t kMaxViewRank = 16;  // the layout's limit, so that more is a mismatch anyway

struct BufferView {
  void* data = nullptr;  // the first element
  int xla_dtype = 0;     // XLA_FFI_DataType
  dlpack::Device device{};
  int64_t rank = 0;
  const int64_t* shape = nullptr;
  const int64_t* strides = nullptr;  // in elements; null for row-major
  bool read_only = false;
  bool immutable = false;                         // a jax.Array
  bool address = false;                           // nothing but `data` is known
  std::array<int64_t, 2 * kMaxViewRank> storage;  // for shapes and strides that had to be computed

  // Throws Error for an element type that no program has.
  void set(const dlpack::Tensor& tensor, uint64_t flags, const std::string& label);
};

// "(2, 3)"
std::string describe_dims(const int64_t* dims, int64_t rank);

// XLA_FFI_DataType of numpy's kind ('f') and size in bytes; -1 if there is none.
int xla_dtype_of(char kind, int64_t bytes);
dlpack::DataType dlpack_dtype_of(int xla_dtype);

}  // namespace cudnn_jax
