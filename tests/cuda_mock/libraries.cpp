// cuBLAS, cuDNN and NCCL without a GPU: handles remember their stream, and every computation is one kernel on it.
//
// build.py generates the functions of these libraries that torch links to and that are missing here: matrix products
// are kernels too, some do nothing or create a descriptor, anything else fails and is counted as "unsupported".
#include "mock.hpp"

// The headers of 16-bit and 8-bit floats need more than torch's wheels contain; prototypes need the names only.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
struct __half;
struct __nv_bfloat16;

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cudnn.h>
#include <nccl.h>

#include <cstring>
#include <string>

struct cublasContext {
  cudaStream_t stream;
  cublasMath_t math;
  cublasPointerMode_t pointers;
};

struct cudnnContext {
  cudaStream_t stream;
};

struct ncclComm {
  int rank, size;
};

namespace {

constexpr size_t WORKSPACE_BYTES = 1 << 20;

}  // namespace

extern "C" {

// --- what build.py generates calls to ---------------------------------------------------------------------------------

int mock_blas_kernel(cublasHandle_t handle, const char* name) {
  return mock::enqueue(handle->stream, "kernel", name) ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}

int mock_unsupported(const char* name) {
  mock::count("unsupported");
  mock::count(std::string("unsupported ") + name);
  return cudaErrorNotSupported;
}

// All descriptors are one whose content nothing reads.
int mock_create(void* descriptor) {
  static char content[256];
  *static_cast<void**>(descriptor) = content;
  return 0;
}

// --- cuBLAS ----------------------------------------------------------------------------------------------------------

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  *handle = new cublasContext{};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  handle->math = mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode) {
  *mode = handle->math;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
  handle->pointers = mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t* mode) {
  *mode = handle->pointers;
  return CUBLAS_STATUS_SUCCESS;
}

size_t cublasLtGetVersion() { return CUBLAS_VERSION; }

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t results[],
                                              int* count) {
  results[0] = {};
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*, cublasLtMatrixLayout_t,
                              const void*, cublasLtMatrixLayout_t, const void*, const void*, cublasLtMatrixLayout_t,
                              void*, cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t*, void*, size_t,
                              cudaStream_t stream) {
  bool has_failed = mock::enqueue(stream, "kernel", "cublasLtMatmul");
  return has_failed ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}

// --- cuDNN: handles and descriptors of tensors ------------------------------------------------------------------------

static cudnnStatus_t cudnn_kernel(cudnnHandle_t handle, const char* name) {
  return mock::enqueue(handle->stream, "kernel", name) ? CUDNN_STATUS_EXECUTION_FAILED : CUDNN_STATUS_SUCCESS;
}

size_t cudnnGetVersion() { return CUDNN_VERSION; }
cudnnStatus_t cudnnGetProperty(libraryPropertyType type, int* value) {
  *value = type == MAJOR_VERSION ? CUDNN_MAJOR : type == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
  return CUDNN_STATUS_SUCCESS;
}

size_t cudnnGetCudartVersion() { return CUDART_VERSION; }
const char* cudnnGetErrorString(cudnnStatus_t) { return "error of the mock's cuDNN"; }
void cudnnGetLastErrorString(char* message, size_t length) { std::strncpy(message, "error of the mock", length); }

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  *handle = new cudnnContext{};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t* stream) {
  *stream = handle->stream;
  return CUDNN_STATUS_SUCCESS;
}

// --- cuDNN: batch normalisation ---------------------------------------------------------------------------------------

cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnActivationDescriptor_t, size_t* bytes) {
  *bytes = WORKSPACE_BYTES;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnActivationDescriptor_t, size_t* bytes) {
  *bytes = WORKSPACE_BYTES;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(cudnnHandle_t, cudnnBatchNormMode_t,
                                                                   cudnnBatchNormOps_t,
                                                                   const cudnnActivationDescriptor_t,
                                                                   const cudnnTensorDescriptor_t, size_t* bytes) {
  *bytes = WORKSPACE_BYTES;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBatchNormalizationForwardTrainingEx(
    cudnnHandle_t handle, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const void*, const void*,
    const cudnnTensorDescriptor_t, const void*, const cudnnTensorDescriptor_t, const void*,
    const cudnnTensorDescriptor_t, void*, const cudnnTensorDescriptor_t, const void*, const void*, double, void*, void*,
    double, void*, void*, cudnnActivationDescriptor_t, void*, size_t, void*, size_t) {
  return cudnn_kernel(handle, "cudnn batch norm");
}

cudnnStatus_t cudnnBatchNormalizationForwardInference(cudnnHandle_t handle, cudnnBatchNormMode_t, const void*,
                                                      const void*, const cudnnTensorDescriptor_t, const void*,
                                                      const cudnnTensorDescriptor_t, void*,
                                                      const cudnnTensorDescriptor_t, const void*, const void*,
                                                      const void*, const void*, double) {
  return cudnn_kernel(handle, "cudnn batch norm inference");
}

cudnnStatus_t cudnnBatchNormalizationBackwardEx(
    cudnnHandle_t handle, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const void*, const void*, const void*, const void*,
    const cudnnTensorDescriptor_t, const void*, const cudnnTensorDescriptor_t, const void*,
    const cudnnTensorDescriptor_t, const void*, const cudnnTensorDescriptor_t, void*, const cudnnTensorDescriptor_t,
    void*, const cudnnTensorDescriptor_t, const void*, const void*, void*, void*, double, const void*, const void*,
    const cudnnActivationDescriptor_t, void*, size_t, void*, size_t) {
  return cudnn_kernel(handle, "cudnn batch norm backward");
}

// --- cuDNN: graphs of operations, as convolutions are -----------------------------------------------------------------

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t, cudnnBackendDescriptor_t* descriptor) {
  return static_cast<cudnnStatus_t>(mock_create(descriptor));
}

// One engine computes everything, with a workspace and no notes about its numbers. Callers provide the descriptors.
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t, int64_t, int64_t* count, void* values) {
  int64_t found = 0;
  switch (name) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS:
    case CUDNN_ATTR_ENGINECFG_ENGINE: found = 1; break;
    case CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT:
      found = 1;
      if (values) *static_cast<int64_t*>(values) = 1;
      break;
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
      found = 1;
      if (values) *static_cast<int64_t*>(values) = WORKSPACE_BYTES;
      break;
    default: break;
  }
  if (count) *count = found;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t) {
  return cudnn_kernel(handle, "cudnn graph");
}

// --- NCCL: every collective is one operation on its stream; no rank sees another's numbers -----------------------------

static ncclResult_t collective(const char* kind, size_t elements, cudaStream_t stream) {
  return mock::enqueue(stream, kind, std::to_string(elements)) ? ncclUnhandledCudaError : ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t) { return "error of the mock's NCCL"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = {};
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* communicator, int size, ncclUniqueId, int rank, ncclConfig_t*) {
  *communicator = new ncclComm{rank, size};
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* communicator, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(communicator, size, id, rank, nullptr);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* communicator, int size, int rank, int, ncclUniqueId*, ncclConfig_t*) {
  return ncclCommInitRankConfig(communicator, size, {}, rank, nullptr);
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int, int key, ncclComm_t* communicator, ncclConfig_t*) {
  *communicator = new ncclComm{key, parent->size};
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  delete communicator;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t communicator) { return ncclCommDestroy(communicator); }

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t communicator, int* count) {
  *count = communicator->size;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t communicator, int* rank) {
  *rank = communicator->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) {
  *handle = nullptr;
  return ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* operation, void*, ncclDataType_t, ncclScalarResidence_t,
                                      ncclComm_t) {
  *operation = ncclSum;
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void*, void*, size_t elements, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                           cudaStream_t stream) {
  return collective("all-reduce", elements, stream);
}

ncclResult_t ncclBroadcast(const void*, void*, size_t elements, ncclDataType_t, int, ncclComm_t, cudaStream_t stream) {
  return collective("broadcast", elements, stream);
}

ncclResult_t ncclBcast(void*, size_t elements, ncclDataType_t, int, ncclComm_t, cudaStream_t stream) {
  return collective("broadcast", elements, stream);
}

ncclResult_t ncclAllGather(const void*, void*, size_t elements, ncclDataType_t, ncclComm_t, cudaStream_t stream) {
  return collective("all-gather", elements, stream);
}

ncclResult_t ncclReduceScatter(const void*, void*, size_t elements, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                               cudaStream_t stream) {
  return collective("reduce-scatter", elements, stream);
}

}  // extern "C"
