//! Element types of K and V, with their names and sizes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::error::quoted;

/// Elements in one block of the quantised types.
const BLOCK_ELEMENTS: u32 = 32;

/// How K and V elements are stored.
///
/// The manifest uses the lower-case names (`f16`, `bf16`, `f32`, `f8_e4m3`, `q8_0`, `q4_0`). The
/// two quantised types are ggml's: blocks of 32 elements of one head row, each an f16 scale and
/// then 32 i8 (34 bytes) or 16 bytes of nibbles (18 bytes); safetensors has no name for them, so
/// their tensors are U8 and the last dimension counts bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Dtype {
    /// IEEE half precision.
    F16,
    /// The upper half of an f32.
    Bf16,
    /// IEEE single precision.
    F32,
    /// 8 bit, 4 exponent and 3 mantissa bits, without infinities (`fn`).
    F8E4m3,
    /// ggml `Q8_0` blocks.
    Q8_0,
    /// ggml `Q4_0` blocks.
    Q4_0,
}

impl Dtype {
    /// All of them, for tables and help texts.
    pub const ALL: [Self; 6] =
        [Self::F16, Self::Bf16, Self::F32, Self::F8E4m3, Self::Q8_0, Self::Q4_0];

    /// The name in a manifest and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::F8E4m3 => "f8_e4m3",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
        }
    }

    /// The name in a safetensors header.
    pub fn safetensors_name(self) -> &'static str {
        match self {
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::F32 => "F32",
            Self::F8E4m3 => "F8_E4M3",
            Self::Q8_0 | Self::Q4_0 => "U8",
        }
    }

    /// Elements that are stored together; a row must be a multiple of this long.
    pub fn block_elements(self) -> u32 {
        match self {
            Self::F16 | Self::Bf16 | Self::F32 | Self::F8E4m3 => 1,
            Self::Q8_0 | Self::Q4_0 => BLOCK_ELEMENTS,
        }
    }

    /// Bytes of one block (of one element where [`block_elements`](Self::block_elements) is 1).
    pub fn block_bytes(self) -> u32 {
        match self {
            Self::F8E4m3 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::Q4_0 => 2 + BLOCK_ELEMENTS / 2,
            Self::Q8_0 => 2 + BLOCK_ELEMENTS,
        }
    }

    /// Bytes of a row of `elements`, which is a multiple of the block.
    pub fn row_bytes(self, elements: u32) -> u64 {
        u64::from(elements / self.block_elements()) * u64::from(self.block_bytes())
    }

    /// Last dimension of a tensor with rows of `elements`: elements, or bytes for blocks.
    pub fn stored_dim(self, elements: u32) -> u64 {
        if self.block_elements() == 1 { u64::from(elements) } else { self.row_bytes(elements) }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Dtype {
    type Err = String;

    /// Upper and lower case mean the same, so that safetensors names work on the command line.
    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|dtype| dtype.name().eq_ignore_ascii_case(text)).ok_or_else(
            || {
                let names = Self::ALL.map(Self::name).join(", ");
                format!("unknown dtype {}: one of {names}", quoted(text))
            },
        )
    }
}

impl TryFrom<String> for Dtype {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Dtype> for String {
    fn from(dtype: Dtype) -> Self {
        dtype.name().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_sizes() {
        fn check(dtype: Dtype, expected: (&str, &str, u64, u64)) {
            let found = (
                dtype.name(),
                dtype.safetensors_name(),
                dtype.row_bytes(128),
                dtype.stored_dim(128),
            );
            assert_eq!(found, expected);
            assert_eq!(dtype.name().parse(), Ok(dtype));
            assert_eq!(dtype.name().to_uppercase().parse(), Ok(dtype));
        }
        check(Dtype::F16, ("f16", "F16", 256, 128));
        check(Dtype::Bf16, ("bf16", "BF16", 256, 128));
        check(Dtype::F32, ("f32", "F32", 512, 128));
        check(Dtype::F8E4m3, ("f8_e4m3", "F8_E4M3", 128, 128));
        check(Dtype::Q8_0, ("q8_0", "U8", 136, 136));
        check(Dtype::Q4_0, ("q4_0", "U8", 72, 72));
        assert_eq!(
            "int4".parse::<Dtype>(),
            Err("unknown dtype \"int4\": one of f16, bf16, f32, f8_e4m3, q8_0, q4_0".to_owned())
        );
    }
}
