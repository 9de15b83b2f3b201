#include "ffi/dtypes.h"

#include "xla/ffi/api/c_api.h"

namespace cudnn_jax {
namespace {

struct Entry {
  const char* name;
  int xla;
};

constexpr Entry kDtypes[] = {
    {"bool", XLA_FFI_DataType_PRED},
    {"int8", XLA_FFI_DataType_S8},
    {"uint8", XLA_FFI_DataType_U8},
    {"int16", XLA_FFI_DataType_S16},
    {"uint16", XLA_FFI_DataType_U16},
    {"int32", XLA_FFI_DataType_S32},
    {"uint32", XLA_FFI_DataType_U32},
    {"int64", XLA_FFI_DataType_S64},
    {"uint64", XLA_FFI_DataType_U64},
    {"float16", XLA_FFI_DataType_F16},
    {"bfloat16", XLA_FFI_DataType_BF16},
    {"float32", XLA_FFI_DataType_F32},
    {"float64", XLA_FFI_DataType_F64},
    {"float8_e4m3fn", XLA_FFI_DataType_F8E4M3FN},
    {"float8_e5m2", XLA_FFI_DataType_F8E5M2},
    {"float8_e8m0fnu", XLA_FFI_DataType_F8E8M0FNU},
    {"float4_e2m1fn", XLA_FFI_DataType_F4E2M1FN},
};

}  // namespace

int xla_dtype_of(const std::string& name) {
  for (const Entry& entry : kDtypes) {
    if (name == entry.name) return entry.xla;
  }
  return -1;
}

std::string dtype_name_of(int xla_dtype) {
  for (const Entry& entry : kDtypes) {
    if (xla_dtype == entry.xla) return entry.name;
  }
  return "dtype " + std::to_string(xla_dtype);
}

}  // namespace cudnn_jax
