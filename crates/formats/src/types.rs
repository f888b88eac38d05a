//! `enum ggml_type`: the numbers are part of the GGUF format.

use kvfs_page::Dtype;

pub(crate) const F32: i32 = 0;
pub(crate) const F16: i32 = 1;
pub(crate) const Q4_0: i32 = 2;
pub(crate) const Q8_0: i32 = 8;
pub(crate) const BF16: i32 = 30;

/// The number of a dtype; none of one that ggml has not.
pub(crate) fn of_dtype(dtype: Dtype) -> Option<i32> {
    Some(match dtype {
        Dtype::F32 => F32,
        Dtype::F16 => F16,
        Dtype::Bf16 => BF16,
        Dtype::Q8_0 => Q8_0,
        Dtype::Q4_0 => Q4_0,
        Dtype::F8E4m3 => return None,
    })
}
