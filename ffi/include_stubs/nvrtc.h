// The part of NVRTC's interface that cudnn_frontend's headers name. The real header is only in a wheel of
// 58 MB; nothing here is linked, and the engines that would call it are never registered.
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  NVRTC_SUCCESS = 0,
  NVRTC_ERROR_INTERNAL_ERROR = 11,
} nvrtcResult;

typedef struct _nvrtcProgram* nvrtcProgram;

#ifdef __cplusplus
}
#endif
