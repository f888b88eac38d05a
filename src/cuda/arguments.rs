//! What the kernels are passed: mirrors of the structures in `kernels/arguments.h`, `prepare.h`,
//! `attend.h`, `merge.h`, `mass.h` and `summary.h`, which say what the fields mean. Addresses are those of the device.

use crate::attention::Shape;

/// Consecutive tokens of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Page {
    pub(super) k: u64,
    pub(super) v: u64,
    pub(super) k_head_stride: u32,
    pub(super) k_token_stride: u32,
    pub(super) v_head_stride: u32,
    pub(super) v_token_stride: u32,
    pub(super) position: i64,
    pub(super) tokens: u32,
    pub(super) index: u32,
    pub(super) queries: u32,
    pub(super) reserved: u32,
}

/// One block's share of the tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Split {
    pub(super) page: u32,
    pub(super) token: u32,
    pub(super) tokens: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
#[allow(clippy::struct_field_names, reason = "they are those of the kernels")]
pub(super) struct Heads {
    pub(super) num_queries: u32,
    pub(super) num_kv_heads: u32,
    pub(super) group: u32,
    pub(super) head_dim: u32,
    pub(super) v_head_dim: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct AttendArguments {
    pub(super) heads: Heads,
    pub(super) window: u32,
    pub(super) soft_cap: f32,
    pub(super) q: u64,
    pub(super) pages: u64,
    pub(super) splits: u64,
    pub(super) positions: u64,
    pub(super) o: u64,
    pub(super) m: u64,
    pub(super) l: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct MassArguments {
    pub(super) heads: Heads,
    pub(super) window: u32,
    pub(super) soft_cap: f32,
    pub(super) q: u64,
    pub(super) pages: u64,
    pub(super) splits: u64,
    pub(super) positions: u64,
    pub(super) m: u64,
    pub(super) l: u64,
    pub(super) mass: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct SummaryArguments {
    pub(super) pages: u64,
    pub(super) bounds: u64,
    pub(super) num_kv_heads: u32,
    pub(super) head_dim: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct BoundArguments {
    pub(super) heads: Heads,
    pub(super) factor: f32,
    pub(super) q: u64,
    pub(super) pages: u64,
    pub(super) bounds: u64,
    pub(super) num_pages: u32,
    pub(super) most: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct PrepareArguments {
    pub(super) heads: Heads,
    pub(super) scale: f32,
    pub(super) q: u64,
    pub(super) turns: u64,
    pub(super) pairs: u32,
    pub(super) first: u32,
    pub(super) interleaved: u32,
    pub(super) prepared: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct MergeArguments {
    pub(super) o: u64,
    pub(super) m: u64,
    pub(super) l: u64,
    pub(super) sinks: u64,
    pub(super) merged_o: u64,
    pub(super) merged_m: u64,
    pub(super) merged_l: u64,
    pub(super) parts: u32,
    pub(super) rows: u32,
    pub(super) num_qo_heads: u32,
    pub(super) v_head_dim: u32,
}

const _: () = {
    assert!(size_of::<Page>() == Page::BYTES && size_of::<Split>() == Split::BYTES);
    assert!(size_of::<AttendArguments>() == 88 && size_of::<PrepareArguments>() == 64);
    assert!(size_of::<MergeArguments>() == 72 && size_of::<MassArguments>() == 88);
    assert!(size_of::<SummaryArguments>() == 24 && size_of::<BoundArguments>() == 64);
};

impl Page {
    pub(super) const BYTES: usize = 56;

    /// As it lies in memory.
    pub(super) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let words =
            [self.k_head_stride, self.k_token_stride, self.v_head_stride, self.v_token_stride];
        bytes[0..8].copy_from_slice(&self.k.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.v.to_le_bytes());
        put(&mut bytes[16..32], &words);
        bytes[32..40].copy_from_slice(&self.position.to_le_bytes());
        put(&mut bytes[40..56], &[self.tokens, self.index, self.queries, self.reserved]);
        bytes
    }
}

impl Split {
    pub(super) const BYTES: usize = 12;

    /// As it lies in memory.
    pub(super) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        put(&mut bytes, &[self.page, self.token, self.tokens]);
        bytes
    }
}

fn put(bytes: &mut [u8], words: &[u32]) {
    for (bytes, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
}

impl Heads {
    #[allow(clippy::cast_possible_truncation, reason = "a shape's numbers are below 2^17")]
    pub(super) fn new(shape: Shape, num_queries: u32) -> Self {
        Self {
            num_queries,
            num_kv_heads: shape.num_kv_heads() as u32,
            group: shape.group() as u32,
            head_dim: shape.head_dim() as u32,
            v_head_dim: shape.v_head_dim() as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::mem::offset_of;
    use std::path::Path;
    use std::process::Command;

    use super::*;

    /// `static_assert`s of a structure's size and of where its fields are.
    macro_rules! mirrored {
        ($source:ident, $name:ident as $cpp:literal: $($field:ident as $path:literal),+ $(,)?) => {{
            let size = size_of::<$name>();
            writeln!($source, "static_assert(sizeof(kvfs::{}) == {size});", $cpp).unwrap();
            $({
                let offset = offset_of!($name, $field);
                writeln!($source, "static_assert(offsetof(kvfs::{}, {}) == {offset});", $cpp, $path)
                    .unwrap();
            })+
        }};
    }

    #[test]
    fn are_laid_out_as_in_the_kernels() {
        if Command::new("c++").arg("--version").output().is_err() {
            eprintln!("skipped: no c++");
            return;
        }
        let mut source = String::from("#include <cstddef>\n");
        for name in ["attend", "prepare", "merge", "mass", "summary"] {
            writeln!(source, "#include \"{name}.h\"").unwrap();
        }
        mirrored!(source, Page as "Page": k as "k", v as "v", k_head_stride as "k_head_stride",
            k_token_stride as "k_token_stride", v_head_stride as "v_head_stride",
            v_token_stride as "v_token_stride", position as "position", tokens as "tokens",
            index as "index", queries as "queries");
        mirrored!(source, Split as "Split": page as "page", token as "token", tokens as "tokens");
        mirrored!(source, Heads as "Heads": num_queries as "num_queries",
            num_kv_heads as "num_kv_heads", group as "group", head_dim as "head_dim",
            v_head_dim as "v_head_dim");
        mirrored!(source, AttendArguments as "AttendArguments": heads as "attention.heads",
            window as "attention.window", soft_cap as "attention.soft_cap", q as "attention.q",
            pages as "attention.pages", splits as "attention.splits",
            positions as "attention.positions", o as "o", m as "m", l as "l");
        mirrored!(source, MassArguments as "MassArguments": heads as "attention.heads",
            window as "attention.window", soft_cap as "attention.soft_cap", q as "attention.q",
            pages as "attention.pages", splits as "attention.splits",
            positions as "attention.positions", m as "m", l as "l", mass as "mass");
        mirrored!(source, SummaryArguments as "SummaryArguments": pages as "pages",
            bounds as "bounds", num_kv_heads as "num_kv_heads", head_dim as "head_dim");
        mirrored!(source, BoundArguments as "BoundArguments": heads as "heads",
            factor as "factor", q as "q", pages as "pages", bounds as "bounds",
            num_pages as "num_pages", most as "most");
        mirrored!(source, PrepareArguments as "PrepareArguments": heads as "heads",
            scale as "scale", q as "q", turns as "turns", pairs as "pairs", first as "first",
            interleaved as "interleaved", prepared as "prepared");
        mirrored!(source, MergeArguments as "MergeArguments": o as "o", m as "m", l as "l",
            sinks as "sinks", merged_o as "merged_o", merged_m as "merged_m",
            merged_l as "merged_l", parts as "parts", rows as "rows",
            num_qo_heads as "num_qo_heads", v_head_dim as "v_head_dim");
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("layout.cpp");
        std::fs::write(&file, source).unwrap();
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut compiler = Command::new("c++");
        compiler.args(["-std=c++17", "-fsyntax-only", "-DKVFS_SHIM", "-Wno-unknown-pragmas", "-w"]);
        compiler.arg("-I").arg(root.join("kernels")).arg("-I").arg(root.join("tests/kernels"));
        let output = compiler.arg(file).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    #[test]
    fn bytes_are_where_the_fields_are() {
        let page = Page {
            k: 1,
            v: 2,
            k_head_stride: 3,
            k_token_stride: 4,
            v_head_stride: 5,
            v_token_stride: 6,
            position: -7,
            tokens: 8,
            index: 9,
            queries: 10,
            reserved: 0,
        };
        let bytes = page.to_bytes();
        assert_eq!(bytes[offset_of!(Page, v)], 2);
        assert_eq!(bytes[offset_of!(Page, v_token_stride)], 6);
        assert_eq!(bytes[offset_of!(Page, position)..][..8], (-7_i64).to_le_bytes());
        assert_eq!(bytes[offset_of!(Page, tokens)], 8);
        assert_eq!(bytes[offset_of!(Page, queries)], 10);
        let split = Split { page: 1, token: 2, tokens: 3 };
        assert_eq!(split.to_bytes(), [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]);
    }
}
