// The functions of the CUDA driver, libcuda.so.1, that torch and NVIDIA's libraries call beside the runtime's.
#include <cuda.h>

#include <cstddef>

#include "mock.hpp"

extern "C" {

static CUcontext context() { return reinterpret_cast<CUcontext>(std::size_t{64}); }

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) { return static_cast<CUresult>(cudaGetDeviceCount(count)); }

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

// The numbers of attributes are those of the runtime.
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return static_cast<CUresult>(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* found, CUdevice) {
  *found = context();
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* found) {
  *found = context();
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }

CUresult cuCtxGetDevice(CUdevice* device) { return static_cast<CUresult>(cudaGetDevice(device)); }

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) {
    *static_cast<CUdeviceptr*>(value) = pointer;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_NOT_SUPPORTED;
}

// Triton's launcher: modules are kernels that torch's compiler has made.
CUresult cuCtxGetLimit(std::size_t* value, CUlimit) {
  *value = 1 << 20;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit, std::size_t) { return CUDA_SUCCESS; }

CUresult cuModuleLoadData(CUmodule* module, const void*) {
  static std::size_t loaded = 0;
  *module = reinterpret_cast<CUmodule>(0x100000 + 64 * ++loaded);
  return CUDA_SUCCESS;
}

CUresult cuModuleLoad(CUmodule* module, const char*) { return cuModuleLoadData(module, nullptr); }

CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(module, image);
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char*) {
  *function = reinterpret_cast<CUfunction>(module);
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }

CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        CUstream stream, void**, void**) {
  return static_cast<CUresult>(mock::enqueue(stream, "kernel", "of a module"));
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* configuration, CUfunction, void**, void**) {
  return static_cast<CUresult>(mock::enqueue(configuration->hStream, "kernel", "of a module"));
}

}  // extern "C"
