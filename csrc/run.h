// Runs a problem on threads, with a kernel.
#pragma once
#include <vector>

#include "problem.h"

namespace ringweave {

void forward(const Problem &pb, const Kernel &kernel, int threads);
void backward(const Problem &pb, const Kernel &kernel, int threads);
void delta(const Problem &pb, const Kernel &kernel, int threads);
double fma_peak(const Kernel &kernel, Dtype dtype, int threads, double seconds);

// The builds that this machine can run, best first.
std::vector<const Kernel *> kernels();

}  // namespace ringweave
