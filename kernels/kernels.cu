// The kernels of one module. The build names a dtype and a width, the elements that the longest
// row has, for those that read K and V: -DKVFS_ELEMENT=F16 -DKVFS_WIDTH=128. Without them it makes
// the kernels that every module shares.
//
// A width takes all head_dim and v_head_dim up to it that are multiples of 8 (of 32 for the blocks
// of q8_0 and q4_0). Rows of more than 256 elements, as the 576 of latent attention, are for the
// CPU.
#include "attend.h"
#include "mass.h"
#include "merge.h"
#include "prepare.h"
#include "summary.h"

using namespace kvfs;

// Without a number of blocks that must fit on a multiprocessor at once, the assembler may aim at so
// many that registers spill.
#define KERNEL(name, BLOCKS, Arguments, ...)                                                \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCKS) name(const Arguments a) { \
        __VA_ARGS__(a);                                                                     \
    }

#ifdef KVFS_ELEMENT
// Rows: a decode step takes the least that holds the group, or 8 at a time.
KERNEL(attend_1, 4, AttendArguments, attend<KVFS_ELEMENT, KVFS_WIDTH, 1, false>)
KERNEL(attend_2, 4, AttendArguments, attend<KVFS_ELEMENT, KVFS_WIDTH, 2, false>)
KERNEL(attend_4, 3, AttendArguments, attend<KVFS_ELEMENT, KVFS_WIDTH, 4, false>)
KERNEL(attend_5, 2, AttendArguments, attend<KVFS_ELEMENT, KVFS_WIDTH, 5, false>)
KERNEL(attend_8, 2, AttendArguments, attend<KVFS_ELEMENT, KVFS_WIDTH, 8, false>)
// Several queries with a causal mask, and windows.
KERNEL(attend_masked_8, 2, AttendArguments, attend<KVFS_ELEMENT, KVFS_WIDTH, 8, true>)
KERNEL(add_mass_4, 4, MassArguments, add_mass<KVFS_ELEMENT, KVFS_WIDTH, 4>)
KERNEL(summarise_pages, 4, SummaryArguments, summarise<KVFS_ELEMENT, KVFS_WIDTH>)
#else
KERNEL(prepare, 4, PrepareArguments, prepare_queries)
KERNEL(merge, 4, MergeArguments, merge_partials)
KERNEL(finish, 4, MergeArguments, finish_partials)
KERNEL(bound_pages, 4, BoundArguments, bound_logits)
#endif
