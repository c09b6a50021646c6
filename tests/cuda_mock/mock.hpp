// What the stand-ins for NVIDIA's libraries share: counters, and the queue of work of a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <string>

namespace mock {

using Work = std::function<void()>;

// Add to a counter; Python reads them with `mock_counters`.
void count(const std::string& name, long amount = 1);

// Count an illegal call, keep its error for cudaGetLastError, and return it.
cudaError_t fail(cudaError_t error, const char* call);

// Queue an operation on a stream. On a capturing stream it becomes a node of the graph, counted as "recorded KIND".
// `detail` is only traced.
cudaError_t enqueue(cudaStream_t stream, const std::string& kind, const std::string& detail = "", Work work = {});

}  // namespace mock
