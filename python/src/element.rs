//! What an array is made of, in the words of DLPack, of arrays in Python and of manifests.

use kvfs_page::Dtype;

/// An element type: DLPack's code of the kind, and bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Element {
    pub(crate) code: u8,
    pub(crate) bits: u8,
}

const INT: u8 = 0;
const UINT: u8 = 1;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;
const FLOAT8_E4M3FN: u8 = 10;

impl Element {
    pub(crate) const U8: Self = Self { code: UINT, bits: 8 };
    pub(crate) const F32: Self = Self { code: FLOAT, bits: 32 };
    pub(crate) const F16: Self = Self { code: FLOAT, bits: 16 };
    pub(crate) const BF16: Self = Self { code: BFLOAT, bits: 16 };

    /// Of pages; those of quantised types are bytes.
    pub(crate) fn of(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F16 => Self::F16,
            Dtype::Bf16 => Self::BF16,
            Dtype::F32 => Self::F32,
            Dtype::F8E4m3 => Self { code: FLOAT8_E4M3FN, bits: 8 },
            Dtype::Q8_0 | Dtype::Q4_0 => Self { code: UINT, bits: 8 },
        }
    }

    /// The same bits as a whole number, for libraries that do not know the type.
    pub(crate) fn as_bits(self) -> Self {
        Self { code: UINT, bits: self.bits }
    }

    /// From the format of a buffer (module `struct`, in the byte order of the machine).
    pub(crate) fn from_format(letter: &str, bytes: usize) -> Option<Self> {
        let bits = u8::try_from(bytes * 8).ok()?;
        let code = match letter {
            "e" | "f" | "d" => FLOAT,
            "b" | "h" | "i" | "l" | "q" | "n" => INT,
            "B" | "H" | "I" | "L" | "Q" | "N" | "c" => UINT,
            _ => return None,
        };
        Some(Self { code, bits })
    }

    pub(crate) fn is_integer(self) -> bool {
        matches!(self.code, INT | UINT)
    }

    pub(crate) fn is_signed(self) -> bool {
        self.code == INT
    }

    pub(crate) fn bytes(self) -> usize {
        usize::from(self.bits / 8)
    }

    /// Whether an array of these may be stored as `dtype`: the same, or its bits where a library has no
    /// such type.
    pub(crate) fn stands_for(self, dtype: Dtype) -> bool {
        let wanted = Self::of(dtype);
        let has_bits = matches!(dtype, Dtype::Bf16 | Dtype::F8E4m3);
        self == wanted || (has_bits && self == wanted.as_bits())
    }

    /// As arrays in Python call it.
    pub(crate) fn name(self) -> String {
        let kind = match self.code {
            INT => "int",
            UINT => "uint",
            FLOAT => "float",
            BFLOAT => "bfloat",
            FLOAT8_E4M3FN => return "float8_e4m3fn".to_owned(),
            code => return format!("DLPack type {code} of {} bits", self.bits),
        };
        format!("{kind}{}", self.bits)
    }
}
