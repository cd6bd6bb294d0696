// Runs a problem on several threads with a kernel.
#pragma once
#include <vector>

#include "schedule.h"

namespace ringweave {

// `work` is row_work(pb) for forward and column_work(pb) for backward, made for the call or cached for equal calls.
void forward(const Problem &pb, const Work &work, const Kernel &kernel, int threads);
void backward(const Problem &pb, const Work &work, const Kernel &kernel, int threads);
// Backward of packed keys; check_packed (module.cpp) checks their plan. There is no work by columns.
void backward_lists(const Problem &pb, const Kernel &kernel, int threads);
void tile_mass(const Problem &pb, const Mass &mass, const Kernel &kernel, int threads);
void choose(const Problem &pb, const Choice &choice, const Kernel &kernel, int threads);
void delta(const Problem &pb, const Kernel &kernel, int threads);
// Merges the part (pb.v, pb.delta) into (pb.out, pb.lse).
void merge(const Problem &pb, const Kernel &kernel, int threads);

// The builds that this machine can run, the best first.
std::vector<const Kernel *> kernels();

}  // namespace ringweave
