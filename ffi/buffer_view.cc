#include "ffi/buffer_view.h"

#include "ffi/dtypes.h"
#include "ffi/error.h"
#include "xla/ffi/api/c_api.h"

namespace cudnn_jax {
namespace {

struct DlpackEntry {
  dlpack::DataType dtype;
  int xla;
  char kind;  // numpy's, 0 where numpy has none
};

constexpr DlpackEntry kDlpackTable[] = {
    {{6, 8, 1}, XLA_FFI_DataType_PRED, 'b'},    {{0, 8, 1}, XLA_FFI_DataType_S8, 'i'},
    {{1, 8, 1}, XLA_FFI_DataType_U8, 'u'},      {{0, 16, 1}, XLA_FFI_DataType_S16, 'i'},
    {{1, 16, 1}, XLA_FFI_DataType_U16, 'u'},    {{0, 32, 1}, XLA_FFI_DataType_S32, 'i'},
    {{1, 32, 1}, XLA_FFI_DataType_U32, 'u'},    {{0, 64, 1}, XLA_FFI_DataType_S64, 'i'},
    {{1, 64, 1}, XLA_FFI_DataType_U64, 'u'},    {{2, 16, 1}, XLA_FFI_DataType_F16, 'f'},
    {{2, 32, 1}, XLA_FFI_DataType_F32, 'f'},    {{2, 64, 1}, XLA_FFI_DataType_F64, 'f'},
    {{4, 16, 1}, XLA_FFI_DataType_BF16, 0},     {{10, 8, 1}, XLA_FFI_DataType_F8E4M3FN, 0},
    {{12, 8, 1}, XLA_FFI_DataType_F8E5M2, 0},   {{14, 8, 1}, XLA_FFI_DataType_F8E8M0FNU, 0},
    {{17, 4, 1}, XLA_FFI_DataType_F4E2M1FN, 0},
};

const DlpackEntry* find_dlpack(const dlpack::DataType& dtype) {
  for (const DlpackEntry& entry : kDlpackTable) {
    if (entry.dtype.code == dtype.code && entry.dtype.bits == dtype.bits) return &entry;
  }
  return nullptr;
}

}  // namespace

bool Place::takes(const dlpack::Device& device) const {
  if (platform == Platform::kCpu) return device.type == dlpack::kCpu || device.type == dlpack::kCudaHost;
  return device.type == dlpack::kCudaManaged || (device.type == dlpack::kCuda && device.id == this->device);
}

std::string Place::describe() const {
  return platform == Platform::kCpu ? "cpu" : "cuda:" + std::to_string(device);
}

std::string describe(const dlpack::Device& device) {
  const std::string id = std::to_string(device.id);
  switch (device.type) {
    case dlpack::kCpu: return "cpu";
    case dlpack::kCuda: return "cuda:" + id;
    case dlpack::kCudaHost: return "host memory of CUDA";
    case dlpack::kCudaManaged: return "managed memory of CUDA";
    default: return "DLPack device (" + std::to_string(device.type) + ", " + id + ")";
  }
}

void BufferView::set(const dlpack::Tensor& tensor, uint64_t flags, const std::string& label) {
  const DlpackEntry* entry = find_dlpack(tensor.dtype);
  const bool pairs = tensor.dtype.bits == 4 && tensor.dtype.lanes == 2;
  if (entry == nullptr || (tensor.dtype.lanes != 1 && !pairs)) {
    throw Error(ErrorKind::kInvalidArgument,
                label + ": the buffer's element type is DLPack's (code " + std::to_string(tensor.dtype.code) +
                    ", bits " + std::to_string(tensor.dtype.bits) + ", lanes " +
                    std::to_string(tensor.dtype.lanes) + "), which no program has");
  }
  if (tensor.dtype.bits < 8 && (flags & dlpack::kPadded) != 0) {
    throw Error(ErrorKind::kInvalidArgument, label + ": the buffer keeps one " + dtype_name_of(entry->xla) +
                                                 " in a byte, the rule is two");
  }
  data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  xla_dtype = entry->xla;
  device = tensor.device;
  rank = tensor.rank;
  shape = tensor.shape;
  strides = tensor.strides;
  read_only = (flags & dlpack::kReadOnly) != 0;
  if (!pairs || rank < 1 || rank > kMaxViewRank) return;
  // Counted in pairs along the axis of neighbours, in single elements here.
  int64_t axis = rank - 1;
  for (int64_t i = 0; strides != nullptr && i < rank; ++i) {
    if (strides[i] == 1) axis = i;
  }
  for (int64_t i = 0; i < rank; ++i) {
    storage[i] = i == axis ? 2 * shape[i] : shape[i];
    if (strides != nullptr) storage[kMaxViewRank + i] = i == axis ? 1 : 2 * strides[i];
  }
  shape = storage.data();
  if (strides != nullptr) strides = storage.data() + kMaxViewRank;
}

std::string describe_dims(const int64_t* dims, int64_t rank) {
  std::string text = "(";
  for (int64_t i = 0; i < rank; ++i) text += (i == 0 ? "" : ", ") + std::to_string(dims[i]);
  return text + (rank == 1 ? ",)" : ")");
}

int xla_dtype_of(char kind, int64_t bytes) {
  for (const DlpackEntry& entry : kDlpackTable) {
    if (entry.kind == kind && entry.dtype.bits == 8 * bytes) return entry.xla;
  }
  return -1;
}

dlpack::DataType dlpack_dtype_of(int xla_dtype) {
  for (const DlpackEntry& entry : kDlpackTable) {
    if (entry.xla == xla_dtype) return entry.dtype;
  }
  return {};
}

}  // namespace cudnn_jax
