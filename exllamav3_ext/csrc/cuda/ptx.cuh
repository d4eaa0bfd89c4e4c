// The few PTX instructions the kernels use, each behind one function. sm_80 and newer.

#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <utility>

namespace exl3 {

// Calls f(integral_constant<int, 0>), ..., f(integral_constant<int, N - 1>): a loop whose index is
// a constant, so that register arrays stay in registers.
template <int N, class F>
__device__ __forceinline__ void unroll(F&& f) {
    [&]<int... I>(std::integer_sequence<int, I...>) {
        (f(std::integral_constant<int, I>{}), ...);
    }(std::make_integer_sequence<int, N>{});
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Asynchronous copy of 16 bytes to shared memory, past L1.
__device__ __forceinline__ void copy_async16(uint32_t shared, const void* global) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::); }
template <int Pending>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Adds and returns the old value; orders everything before it, and everything after it, for the
// device.
__device__ __forceinline__ int atomic_add_acq_rel(int* p, int value) {
    int old;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(p), "r"(value)
                 : "memory");
    return old;
}

// Thread block clusters (sm_90): blocks that run at the same time and write to each other's shared
// memory. Launches for older cards have clusters of one block, and no thread gets here.
//
// A barrier of all threads of a cluster in two halves: what was written before arriving, in any of
// its blocks, can be read after waiting.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// The shared memory of block `rank` of the cluster at the place of `shared`, an address in this
// block's, and a store to such an address.
__device__ __forceinline__ uint32_t address_in_cluster(uint32_t shared, int rank) {
    uint32_t there = shared;
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
#endif
    return there;
}
__device__ __forceinline__ void store_in_cluster(uint32_t there, float4 v) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(there), "f"(v.x),
                 "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
#endif
}

// Programmatic dependent launch (sm_90): the next kernel in the stream, if it was launched for
// that, may start when all thread blocks of this one have come here or ended ...
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// ... and waits here until all kernels before it have completed and what they wrote can be read.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Asks for `bytes`, a multiple of 16, at a 16-byte aligned address to be brought to the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* global, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes));
#endif
}

// d += a b, a 16x16, b 16x8, float16 in, float32 accumulation.
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// d += a b, a 16x32 unsigned bytes, b 32x8 signed bytes, exact int32 accumulation.
__device__ __forceinline__ void mma(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t bits_of(__half2 h) { return *reinterpret_cast<uint32_t*>(&h); }
__device__ __forceinline__ __half2 half2_of(uint32_t u) { return *reinterpret_cast<__half2*>(&u); }

}  // namespace exl3
