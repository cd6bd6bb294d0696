/* A libcuda that runs nothing: what Triton's own launcher calls, with the driver's checks of a tensor map.

A launch is handed to a function of the test (see stand_in.py), with its parameters; everything else answers as a device would. */

#include <stdlib.h>
#include <string.h>

#include "cuda.h"

static int shared_optin[] = {232448, 166912, 232448};
static int units[] = {132, 108, 148};
static CUresult (*on_launch)(void *function, const unsigned *grid, unsigned threads, unsigned shared,
                             void **parameters) = NULL;

void stand_in_tell(CUresult (*function)(void *, const unsigned *, unsigned, unsigned, void **)) {
  on_launch = function;
}

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = 3, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) { return *text = "refused by the stand-in", CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { return *module = (CUmodule)image, CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { return *status = 0, CUDA_SUCCESS; }

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
    return *value = shared_optin[device], CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
    return *value = shared_optin[device] + 1024, CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
    return *value = units[device], CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    return *value = 65536, CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
    return *value = 32, CUDA_SUCCESS;
  default:
    return *value = 1, CUDA_SUCCESS;
  }
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  return *function = malloc(1), CUDA_SUCCESS;
}

/* what a kernel needs is read from its binary, by cuobjdump */
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  return *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  return *(CUdeviceptr *)data = pointer, CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  static const unsigned size_of[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  static const unsigned span_of[] = {1 << 30, 32, 64, 128};
  unsigned row = box[0] * size_of[type];
  if (rank < 1 || rank > 5 || (cuuint64_t)address % 16 || row % 16 || row > span_of[swizzle])
    return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < rank; i++)
    if (dims[i] < 1 || dims[i] > 1ull << 32 || box[i] < 1 || box[i] > 256 || steps[i] != 1)
      return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i + 1 < rank; i++)
    if (strides[i] % 16 || strides[i] >= 1ull << 40)
      return CUDA_ERROR_INVALID_VALUE;
  /* as ptx_emulator.py reads it: the device's own layout is a secret */
  unsigned char *to = memset(map, 0, sizeof(*map));
  unsigned last = rank - 1, mode = swizzle;
  memcpy(to, &address, 8);
  for (unsigned i = 0; i < rank; i++) {
    unsigned dim = dims[i];
    memcpy(to + 8 + 4 * i, &dim, 4);
    memcpy(to + 64 + 4 * i, &box[i], 4);
  }
  memcpy(to + 32, strides, 8 * last);
  memcpy(to + 84, &size_of[type], 4);
  memcpy(to + 88, &last, 4);
  memcpy(to + 92, &mode, 4);
  return CUDA_SUCCESS;
}


CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  unsigned grid[] = {config->gridDimX, config->gridDimY, config->gridDimZ};
  if (grid[0] > 0x7fffffff || grid[1] > 65535 || grid[2] > 65535 || config->blockDimX > 1024)
    return CUDA_ERROR_INVALID_VALUE;
  return on_launch(function, grid, config->blockDimX, config->sharedMemBytes, parameters);
}
