// Runs a problem on threads, with a kernel.
#pragma once
#include <vector>

#include "schedule.h"

namespace ringweave {

// Of row_work(pb), of column_work(pb): made anew for each call, or kept for calls that are alike.
void forward(const Problem &pb, const Work &work, const Kernel &kernel, int threads);
void backward(const Problem &pb, const Work &work, const Kernel &kernel, int threads);
void tile_mass(const Problem &pb, const Mass &mass, const Kernel &kernel, int threads);
void delta(const Problem &pb, const Kernel &kernel, int threads);
double fma_peak(const Kernel &kernel, Dtype dtype, int threads, double seconds);
uint64_t read_all(const uint64_t *words, int64_t n, int threads);

// The builds that this machine can run: the best first, behind it those whose speed is not known.
std::vector<const Kernel *> kernels();
// Why one of them cannot be used after all, or null: for tiles the system's permission is asked when they are first used.
const char *refusal(const Kernel &kernel);

}  // namespace ringweave
