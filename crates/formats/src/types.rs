//! `enum ggml_type`: the numbers are part of the GGUF format.

pub(crate) const F32: i32 = 0;
pub(crate) const F16: i32 = 1;
pub(crate) const Q4_0: i32 = 2;
pub(crate) const Q8_0: i32 = 8;
pub(crate) const BF16: i32 = 30;
