// Copies of contiguous runs with the bulk copy engine (sm_90): global -> shared -> global, one warp a CTA.
//
// The warp keeps a ring of `n_stages` shared-memory chunks. Lane 0 issues every copy; all lanes together look up row
// numbers, 32 chunks ahead, so that no list access stands between two copies. A stage is refilled as soon as the store
// before the current one has been read out of shared memory.
//
// Needs 16-byte aligned pools and runs, chunk_bytes a multiple of 16.

#include <cuda_runtime.h>
#include <stdint.h>

namespace {

constexpr int kMaxStages = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

struct Copy {
  const char* from;
  char* to;
  int bytes;  // 0: this chunk is skipped
};

struct Runs {
  const char* source;
  char* target;
  const int64_t* source_rows;
  const int64_t* target_rows;
  int64_t n_pairs;
  int64_t n_source_rows;
  int64_t n_target_rows;
  int64_t run_bytes;
  int chunk_bytes;
  int chunks_per_run;
};

__device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void barrier_init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

__device__ void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

__device__ void load(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

__device__ void store(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}

__device__ void commit_store() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// All stores but the latest have been read out of shared memory.
__device__ void wait_previous_stores_read() { asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory"); }

__device__ void wait_all_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Where chunk `chunk` comes from and goes to; a row outside its pool skips the chunk.
__device__ Copy look_up(const Runs& runs, int64_t chunk, int64_t n_chunks) {
  Copy copy{nullptr, nullptr, 0};
  if (chunk >= n_chunks) return copy;
  const int64_t pair = chunk / runs.chunks_per_run;
  const int64_t source_row = runs.source_rows[pair];
  const int64_t target_row = runs.target_rows[pair];
  if (source_row < 0 || source_row >= runs.n_source_rows) return copy;
  if (target_row < 0 || target_row >= runs.n_target_rows) return copy;
  const int64_t offset = (chunk - pair * runs.chunks_per_run) * runs.chunk_bytes;
  const int64_t left = runs.run_bytes - offset;
  copy.from = runs.source + source_row * runs.run_bytes + offset;
  copy.to = runs.target + target_row * runs.run_bytes + offset;
  copy.bytes = static_cast<int>(left < runs.chunk_bytes ? left : runs.chunk_bytes);
  return copy;
}

__device__ Copy from_lane(const Copy& copy, int lane) {
  Copy other;
  other.from = reinterpret_cast<const char*>(
      __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(copy.from), lane));
  other.to = reinterpret_cast<char*>(__shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(copy.to), lane));
  other.bytes = __shfl_sync(kFullWarp, copy.bytes, lane);
  return other;
}

// The k-th copy of this CTA, for k only ever growing by one: lanes hold 32 of them and the next 32 are on their way.
struct Lookahead {
  Copy now;
  Copy next;
  int64_t base;

  __device__ Copy at(const Runs& runs, int64_t k, int64_t n_chunks) {
    if (k == base + 32) {
      now = next;
      base = k;
      next = look_up(runs, chunk_of(base + 32 + threadIdx.x), n_chunks);
    }
    return from_lane(now, static_cast<int>(k - base));
  }

  __device__ static int64_t chunk_of(int64_t k) { return k * gridDim.x + blockIdx.x; }

  __device__ void start(const Runs& runs, int64_t n_chunks) {
    base = 0;
    now = look_up(runs, chunk_of(threadIdx.x), n_chunks);
    next = look_up(runs, chunk_of(32 + threadIdx.x), n_chunks);
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(32, 1)
    bulk_copy_kernel(Runs runs, const int32_t* count, int n_stages) {
  extern __shared__ __align__(128) char chunks[];
  __shared__ uint64_t full[kMaxStages];
  const bool leader = threadIdx.x == 0;
  int64_t n = runs.n_pairs;
  if (count != nullptr && *count < n) n = *count < 0 ? 0 : *count;
  const int64_t n_chunks = n * runs.chunks_per_run;
  const int64_t mine = n_chunks > blockIdx.x ? (n_chunks - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
  if (mine == 0) return;
  if (leader) {
    for (int stage = 0; stage < n_stages; ++stage) barrier_init(&full[stage]);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncwarp();

  // Two readers of the same list: `loading` runs n_stages - 1 chunks ahead of `storing`.
  Lookahead loading, storing;
  loading.start(runs, n_chunks);
  storing = loading;
  int64_t issued = 0;
  int load_stage = 0, store_stage = 0;
  uint32_t parity = 0;
  auto issue = [&]() {
    const Copy copy = loading.at(runs, issued, n_chunks);
    if (leader) {
      // A skipped chunk still completes its phase, so that parities stay in step.
      barrier_expect(&full[load_stage], copy.bytes);
      if (copy.bytes > 0) load(chunks + load_stage * runs.chunk_bytes, copy.from, copy.bytes, &full[load_stage]);
    }
    load_stage = load_stage + 1 == n_stages ? 0 : load_stage + 1;
    ++issued;
  };
  while (issued < mine && issued < n_stages - 1) issue();

  for (int64_t k = 0; k < mine; ++k) {
    const Copy copy = storing.at(runs, k, n_chunks);
    if (leader) {
      barrier_wait(&full[store_stage], parity);
      if (copy.bytes > 0) store(copy.to, chunks + store_stage * runs.chunk_bytes, copy.bytes);
      commit_store();
      // The next load lands in the stage of chunk k - 1, whose store is one group back.
      wait_previous_stores_read();
    }
    __syncwarp();
    store_stage = store_stage + 1 == n_stages ? 0 : store_stage + 1;
    if (store_stage == 0) parity ^= 1u;
    if (issued < mine) issue();
  }
  if (leader) wait_all_stores();
}

// Returns a cudaError_t; launches on `stream` and nothing else, so that a graph can hold it.
extern "C" int launch_bulk_copy(const void* source, void* target, const int64_t* source_rows, const int64_t* target_rows,
                                const int32_t* count, int64_t n_pairs, int64_t n_source_rows, int64_t n_target_rows,
                                int64_t run_bytes, int chunk_bytes, int n_stages, int n_ctas, void* stream) {
  if (n_stages < 2 || n_stages > kMaxStages) return cudaErrorInvalidValue;
  const int shared_bytes = n_stages * chunk_bytes;
  const cudaError_t set =
      cudaFuncSetAttribute(bulk_copy_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (set != cudaSuccess) return set;
  Runs runs{static_cast<const char*>(source),
            static_cast<char*>(target),
            source_rows,
            target_rows,
            n_pairs,
            n_source_rows,
            n_target_rows,
            run_bytes,
            chunk_bytes,
            static_cast<int>((run_bytes + chunk_bytes - 1) / chunk_bytes)};
  // One cluster where the number allows it: its CTAs then share a GPC, and the SMs that are left to compute stay in
  // pairs. Scattered, each of these CTAs (it fills an SM's shared memory) also breaks up a pair that a clustered GEMM
  // needs, and the GEMM takes a second wave.
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = n_ctas == 2 || n_ctas == 4 || n_ctas == 8 ? n_ctas : 1;
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(n_ctas);
  config.blockDim = dim3(32);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, bulk_copy_kernel, runs, count, n_stages);
}
