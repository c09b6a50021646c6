// A CUDA runtime without a GPU. Device memory is host memory, copies are real, kernels do nothing but are counted, and
// the rules of stream capture are those of the driver: https://docs.nvidia.com/cuda/cuda-runtime-api.
//
// A queue holds the work of all streams in the order in which it was issued, which is one of the orders that streams
// allow. While the device is slow, work waits there until the host synchronises; otherwise it runs at once.
#include "mock.hpp"

#include <cxxabi.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace {

using mock::Work;
using Lock = std::lock_guard<std::recursive_mutex>;

// Guards everything below. Work never runs under it: work may call Python, which waits for threads that want the lock.
std::recursive_mutex state;

constexpr size_t GIB = size_t{1} << 30;
constexpr size_t DEVICE_BYTES = 80 * GIB;

int device_count() {
  static const int count = std::getenv("MOCK_GPUS") ? std::atoi(std::getenv("MOCK_GPUS")) : 1;
  return count;
}

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

// --- counters --------------------------------------------------------------------------------------------------------

std::map<std::string, long> counters;
std::FILE* trace = nullptr;

void log(const std::string& name, const std::string& detail) {
  if (trace) std::fprintf(trace, "%s %s\n", name.c_str(), detail.c_str());
}

// --- streams, events, captures ---------------------------------------------------------------------------------------

// How many operations of each stream of a capture are known to be finished: a vector clock.
using Clock = std::map<cudaStream_t, long>;

struct Graph {
  std::vector<Work> work;
  long nodes = 0;
};

struct Capture {
  cudaStream_t origin;
  cudaStreamCaptureMode mode;
  pthread_t thread;
  bool is_invalid = false;
  std::map<cudaStream_t, Clock> streams;
  Graph graph;
};

struct Event {
  unsigned long long capture = 0;  // 0: recorded outside captures, or never
  Clock clock;
  long position = 0;
};

std::map<unsigned long long, Capture> captures;
std::map<cudaStream_t, unsigned long long> capture_of;
std::map<cudaEvent_t, Event> events;
std::map<cudaGraph_t, Graph> graphs;
std::map<cudaGraphExec_t, std::shared_ptr<Graph>> executables;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

template <typename Handle>
Handle new_handle() {
  static std::atomic<size_t> next{0x10000};
  return reinterpret_cast<Handle>(next += 64);
}

Capture* capture_on(cudaStream_t stream) {
  auto found = capture_of.find(stream);
  return found == capture_of.end() ? nullptr : &captures.at(found->second);
}

cudaError_t invalidate(Capture& capture, cudaError_t error, const char* call) {
  capture.is_invalid = true;
  return mock::fail(error, call);
}

// Calls that may synchronise or allocate invalidate captures; see cudaThreadExchangeStreamCaptureMode.
cudaError_t check_safe(const char* call) {
  Lock lock(state);
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (auto& [id, capture] : captures) {
    bool is_own = pthread_equal(capture.thread, pthread_self()) && capture.mode != cudaStreamCaptureModeRelaxed;
    bool is_global = thread_mode == cudaStreamCaptureModeGlobal && capture.mode == cudaStreamCaptureModeGlobal;
    if (is_own || is_global) return invalidate(capture, cudaErrorStreamCaptureUnsupported, call);
  }
  return cudaSuccess;
}

// --- the queue -------------------------------------------------------------------------------------------------------

std::deque<Work> pending;
long issued = 0, finished = 0;

bool is_slow = false;

// Run the work issued before a position.
void finish(long position) {
  static std::recursive_mutex running;
  std::lock_guard<std::recursive_mutex> one_at_a_time(running);
  for (;;) {
    Work work;
    {
      Lock lock(state);
      if (finished >= position) return;
      work = std::move(pending.front());
      pending.pop_front();
      ++finished;
    }
    if (work) work();
  }
}

void finish_all() {
  long position;
  {
    Lock lock(state);
    position = issued;
  }
  finish(position);
}

void issue(Work work) {
  {
    Lock lock(state);
    ++issued;
    if (is_slow) {
      pending.push_back(std::move(work));
      return;
    }
    ++finished;
  }
  if (work) work();
}

// --- memory ----------------------------------------------------------------------------------------------------------

std::map<const char*, size_t> device_memory, pinned_memory;

bool holds(const std::map<const char*, size_t>& blocks, const void* pointer) {
  auto address = static_cast<const char*>(pointer);
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return false;
  auto [start, bytes] = *std::prev(after);
  return address < start + bytes;
}

size_t total(const std::map<const char*, size_t>& blocks) {
  size_t sum = 0;
  for (auto& [start, bytes] : blocks) sum += bytes;
  return sum;
}

cudaError_t allocate(void** pointer, size_t bytes, std::map<const char*, size_t>& blocks) {
  Lock lock(state);
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (&blocks == &device_memory && total(device_memory) + bytes > DEVICE_BYTES) return cudaErrorMemoryAllocation;
  void* block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (block == MAP_FAILED) return cudaErrorMemoryAllocation;
  blocks[static_cast<const char*>(block)] = bytes;
  *pointer = block;
  return cudaSuccess;
}

cudaError_t release(void* pointer, std::map<const char*, size_t>& blocks) {
  finish_all();
  Lock lock(state);
  auto found = blocks.find(static_cast<const char*>(pointer));
  if (found == blocks.end()) return mock::fail(cudaErrorInvalidValue, "free of unknown memory");
  munmap(pointer, found->second);
  blocks.erase(found);
  return cudaSuccess;
}

enum class Side { device, pinned, pageable };

Side side_of(const void* pointer) {
  Lock lock(state);
  if (holds(device_memory, pointer)) return Side::device;
  return holds(pinned_memory, pointer) ? Side::pinned : Side::pageable;
}

std::string copy_kind(Side to, Side from) {
  auto host = [](Side side) { return side == Side::pinned ? "pinned" : "pageable"; };
  if (to == Side::device && from == Side::device) return "copy D2D";
  if (to == Side::device) return std::string("copy H2D ") + host(from);
  if (from == Side::device) return std::string("copy D2H ") + host(to);
  return "copy H2H";
}

// Queue a copy of `rows` rows. CUDA reads pageable memory before the call returns, and has written it by then.
cudaError_t copy(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows,
                 cudaStream_t stream) {
  Side to_side = side_of(to), from_side = side_of(from);
  std::string kind = copy_kind(to_side, from_side);
  auto run = [=](const void* source, size_t source_pitch) {
    for (size_t row = 0; row < rows; ++row)
      std::memmove(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(source) + row * source_pitch,
                   width);
  };
  bool is_recorded;
  {
    Lock lock(state);
    is_recorded = capture_on(stream);
    counters[std::string(is_recorded ? "recorded " : "") + kind + " bytes"] += width * rows;
  }
  Work work = [=] { run(from, from_pitch); };
  if (from_side == Side::pageable) {
    auto staged = std::make_shared<std::vector<char>>(width * rows);
    for (size_t row = 0; row < rows; ++row)
      std::memcpy(staged->data() + row * width, static_cast<const char*>(from) + row * from_pitch, width);
    work = [=] { run(staged->data(), width); };
  }
  auto error = mock::enqueue(stream, kind, std::to_string(width * rows), std::move(work));
  if (!error && !is_recorded && to_side == Side::pageable) finish_all();
  return error;
}

// --- kernels ---------------------------------------------------------------------------------------------------------

std::map<const void*, std::string> kernel_names;

std::string kernel_name(const void* kernel) {
  Lock lock(state);
  if (!trace) return "";
  auto found = kernel_names.find(kernel);
  if (found == kernel_names.end()) return "?";
  int status;
  std::unique_ptr<char, void (*)(void*)> name(abi::__cxa_demangle(found->second.c_str(), nullptr, nullptr, &status),
                                              std::free);
  return (status == 0 ? std::string(name.get()) : found->second).substr(0, 160);
}

cudaError_t launch(const void* kernel, cudaStream_t stream) {
  return mock::enqueue(stream, "kernel", kernel_name(kernel));
}

}  // namespace

namespace mock {

void count(const std::string& name, long amount) {
  Lock lock(state);
  counters[name] += amount;
}

cudaError_t fail(cudaError_t error, const char* call) {
  Lock lock(state);
  last_error = error;
  ++counters["illegal call"];
  log("illegal call", std::string(call) + ": " + cudaGetErrorString(error));
  return error;
}

cudaError_t enqueue(cudaStream_t stream, const std::string& kind, const std::string& detail, Work work) {
  {
    Lock lock(state);
    if (auto* capture = capture_on(stream)) {
      if (capture->is_invalid) return fail(cudaErrorStreamCaptureInvalidated, kind.c_str());
      ++capture->streams[stream][stream];
      ++capture->graph.nodes;
      if (work) capture->graph.work.push_back(std::move(work));
      ++counters["recorded " + kind];
      log("recorded " + kind, detail);
      return cudaSuccess;
    }
    ++counters[kind];
    log(kind, detail);
  }
  issue(std::move(work));
  return cudaSuccess;
}

}  // namespace mock

extern "C" {

// --- what Python calls -----------------------------------------------------------------------------------------------

// Return all counters as JSON; valid until the next call.
const char* mock_counters() {
  Lock lock(state);
  static std::string json;
  json = "{";
  for (auto& [name, value] : counters) json += "\"" + name + "\": " + std::to_string(value) + ", ";
  json += "\"pinned bytes\": " + std::to_string(total(pinned_memory)) + ", ";
  json += "\"device bytes\": " + std::to_string(total(device_memory)) + "}";
  return json.c_str();
}

void mock_reset_counters() {
  Lock lock(state);
  counters.clear();
}

void mock_be_slow(bool slow) {
  finish_all();
  Lock lock(state);
  is_slow = slow;
}

// Write every operation and illegal call to a file from now on; an empty path ends that.
void mock_trace(const char* path) {
  Lock lock(state);
  if (trace) std::fclose(trace);
  trace = *path ? std::fopen(path, "w") : nullptr;
}

// Queue call(argument) on a stream as part of the operation before it: it is no node of its own.
void mock_run(cudaStream_t stream, void (*call)(long), long argument) {
  {
    Lock lock(state);
    if (auto* capture = capture_on(stream)) {
      capture->graph.work.push_back([=] { call(argument); });
      return;
    }
  }
  issue([=] { call(argument); });
}

// --- devices ---------------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return mock::fail(cudaErrorInvalidDevice, "cudaSetDevice");
  current_device = device;
  return cudaSuccess;
}

// Those of an H100.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "Mock H100");
  properties->major = 9;
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->totalGlobalMem = DEVICE_BYTES;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerBlockOptin = 227 << 10;
  properties->sharedMemPerMultiprocessor = 228 << 10;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->l2CacheSize = 50 << 20;
  properties->memoryBusWidth = 5120;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->textureAlignment = 512;
  properties->unifiedAddressing = properties->concurrentKernels = properties->cooperativeLaunch = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, device);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *value = properties.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = properties.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = properties.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = properties.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxGridDimX: *value = properties.maxGridSize[0]; break;
    default: *value = 1;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, length, "0000:%02x:00.0", device);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can_access, int, int) {
  *can_access = 1;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

cudaError_t cudaDeviceSynchronize() {
  mock::count("synchronise");
  if (auto error = check_safe("cudaDeviceSynchronize")) return error;
  finish_all();
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotSupported: return "operation not supported by the mock";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
    default: return "error of the mock";
  }
}

const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
  *function = driver ? dlsym(driver, name) : nullptr;
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// --- memory ----------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  mock::count("cudaMalloc");
  if (auto error = check_safe("cudaMalloc")) return error;
  return allocate(pointer, bytes, device_memory);
}

cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  mock::count("cudaFree");
  if (auto error = check_safe("cudaFree")) return error;
  return release(pointer, device_memory);
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  mock::count("cudaHostAlloc");
  if (auto error = check_safe("cudaHostAlloc")) return error;
  return allocate(pointer, bytes, pinned_memory);
}

cudaError_t cudaFreeHost(void* pointer) {
  if (!pointer) return cudaSuccess;
  mock::count("cudaFreeHost");
  if (auto error = check_safe("cudaFreeHost")) return error;
  return release(pointer, pinned_memory);
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  Lock lock(state);
  *total_bytes = DEVICE_BYTES;
  *free_bytes = DEVICE_BYTES - total(device_memory);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = {};
  switch (side_of(pointer)) {
    case Side::device: attributes->type = cudaMemoryTypeDevice; break;
    case Side::pinned: attributes->type = cudaMemoryTypeHost; break;
    case Side::pageable: attributes->type = cudaMemoryTypeUnregistered; break;
  }
  attributes->device = current_device;
  attributes->devicePointer = attributes->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, bytes, from, bytes, bytes, 1, stream);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (auto error = check_safe("cudaMemcpy")) return error;
  auto error = copy(to, bytes, from, bytes, bytes, 1, nullptr);
  finish_all();
  return error;
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, to_pitch, from, from_pitch, width, height, stream);
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy(to, bytes, from, bytes, bytes, 1, stream);
}

cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  return mock::enqueue(stream, "memset", std::to_string(bytes), [=] { std::memset(pointer, value, bytes); });
}

cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  if (auto error = check_safe("cudaMemset")) return error;
  return cudaMemsetAsync(pointer, value, bytes, nullptr);
}

cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
  static char block[1 << 16];
  *pointer = block;
  return cudaSuccess;
}

// --- streams ---------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = new_handle<cudaStream_t>();
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  {
    Lock lock(state);
    ++counters["synchronise"];
    if (auto* capture = capture_on(stream))
      return invalidate(*capture, cudaErrorStreamCaptureUnsupported, "cudaStreamSynchronize");
  }
  finish_all();
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Lock lock(state);
  if (auto* capture = capture_on(stream))
    return invalidate(*capture, cudaErrorStreamCaptureUnsupported, "cudaStreamQuery");
  return finished < issued ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  return mock::enqueue(stream, "host function", "", [=] { function(argument); });
}

// --- events ----------------------------------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new_handle<cudaEvent_t>();
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Lock lock(state);
  events.erase(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Lock lock(state);
  auto* capture = capture_on(stream);
  events[event] = capture ? Event{capture_of[stream], capture->streams[stream], 0} : Event{0, {}, issued};
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  Lock lock(state);
  if (auto error = check_safe("cudaEventQuery")) return error;
  auto found = events.find(event);
  if (found == events.end()) return cudaSuccess;
  if (found->second.capture) return mock::fail(cudaErrorCapturedEvent, "cudaEventQuery");
  return found->second.position > finished ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  long position;
  {
    Lock lock(state);
    ++counters["synchronise"];
    if (events[event].capture) return mock::fail(cudaErrorCapturedEvent, "cudaEventSynchronize");
    position = events[event].position;
  }
  if (auto error = check_safe("cudaEventSynchronize")) return error;
  finish(position);
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 0.01f;
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Lock lock(state);
  auto found = events.find(event);
  if (found == events.end()) return cudaSuccess;  // never recorded: nothing to wait for
  auto* own = capture_on(stream);
  auto waited = captures.find(found->second.capture);
  if (waited == captures.end()) {
    if (own) return invalidate(*own, cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent");
    return found->second.capture ? mock::fail(cudaErrorCapturedEvent, "cudaStreamWaitEvent") : cudaSuccess;
  }
  if (own && own != &waited->second) return invalidate(*own, cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent");
  capture_of[stream] = waited->first;
  Clock& clock = waited->second.streams[stream];
  for (auto& [other, operations] : found->second.clock) clock[other] = std::max(clock[other], operations);
  return cudaSuccess;
}

// --- capture ---------------------------------------------------------------------------------------------------------

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  Lock lock(state);
  if (stream == nullptr || stream == cudaStreamLegacy)
    return mock::fail(cudaErrorStreamCaptureUnsupported, "cudaStreamBeginCapture");
  if (capture_on(stream)) return mock::fail(cudaErrorIllegalState, "cudaStreamBeginCapture");
  static unsigned long long next = 0;
  captures[++next] = Capture{stream, mode, pthread_self(), false, {{stream, {}}}, {}};
  capture_of[stream] = next;
  ++counters["capture"];
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Lock lock(state);
  auto* found = capture_on(stream);
  if (!found || found->origin != stream) return mock::fail(cudaErrorIllegalState, "cudaStreamEndCapture");
  auto id = capture_of[stream];
  Capture capture = std::move(*found);
  captures.erase(id);
  Clock& joined = capture.streams[stream];
  bool is_unjoined = false;
  for (auto& [other, clock] : capture.streams) {
    is_unjoined |= clock[other] > joined[other];
    capture_of.erase(other);
  }
  *graph = nullptr;
  if (capture.is_invalid) return mock::fail(cudaErrorStreamCaptureInvalidated, "cudaStreamEndCapture");
  if (is_unjoined) return mock::fail(cudaErrorStreamCaptureUnjoined, "cudaStreamEndCapture");
  *graph = new_handle<cudaGraph_t>();
  graphs[*graph] = std::move(capture.graph);
  return cudaSuccess;
}

static cudaStreamCaptureStatus status_of(const Capture* capture) {
  if (!capture) return cudaStreamCaptureStatusNone;
  return capture->is_invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Lock lock(state);
  *status = status_of(capture_on(stream));
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* dependency_count) {
  Lock lock(state);
  auto* capture = capture_on(stream);
  *status = status_of(capture);
  if (!capture) return cudaSuccess;
  static const cudaGraphNode_t no_nodes[1] = {};
  if (id) *id = capture_of[stream];
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(capture_of[stream]);
  if (dependencies) *dependencies = no_nodes;
  if (edges) *edges = nullptr;
  if (dependency_count) *dependency_count = 0;
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  Lock lock(state);
  *count = graphs[graph].nodes;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  Lock lock(state);
  *executable = new_handle<cudaGraphExec_t>();
  executables[*executable] = std::make_shared<Graph>(graphs.at(graph));
  counters["graph nodes"] = graphs.at(graph).nodes;
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  std::shared_ptr<Graph> graph;
  {
    Lock lock(state);
    graph = executables.at(executable);
  }
  return mock::enqueue(stream, "graph launch", "", [graph] {
    for (auto& work : graph->work) work();
  });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  if (auto error = check_safe("cudaGraphDestroy")) return error;
  Lock lock(state);
  graphs.erase(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  if (auto error = check_safe("cudaGraphExecDestroy")) return error;
  Lock lock(state);
  executables.erase(executable);
  return cudaSuccess;
}

// --- kernels ---------------------------------------------------------------------------------------------------------

// The functions with two underscores are those that nvcc's code calls; no public header declares them.

void** __cudaRegisterFatBinary(void*) {
  static void* module[1];
  return module;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  Lock lock(state);
  kernel_names[function] = name;
}

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
static thread_local std::vector<Configuration> configurations;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(kernel, stream);
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(kernel, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* kernel, void**) {
  return launch(kernel, configuration->stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->ptxVersion = attributes->binaryVersion = 90;
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->maxDynamicSharedSizeBytes = 227 << 10;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}

}  // extern "C"
