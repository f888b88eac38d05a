//! What the kernels are passed: mirrors of the structures in `kernels/arguments.h`, `prepare.h`,
//! `attend.h`, `merge.h`, `mass.h` and `summary.h`, which say what the fields mean. Addresses are those of the device.

use crate::attention::Shape;

/// Structures as the kernels have them, by the same names of structures and fields; a test asks a
/// compiler where those of the kernels are.
macro_rules! mirrors {
    ($($(#[$attribute:meta])* $name:ident { $($field:ident: $type:ty),+ $(,)? })+) => {
        $(
            $(#[$attribute])*
            #[derive(Debug, Clone, Copy)]
            #[repr(C)]
            pub(super) struct $name {
                $(pub(super) $field: $type,)+
            }
        )+

        /// Of each structure its name, its size, and where its fields are.
        #[cfg(test)]
        const MIRRORS: &[(&str, usize, &[(&str, usize)])] = &[$((
            stringify!($name),
            size_of::<$name>(),
            &[$((stringify!($field), std::mem::offset_of!($name, $field))),+],
        )),+];
    };
}

mirrors! {
    /// Consecutive tokens of one layer.
    #[derive(PartialEq, Eq)]
    Page {
        k: u64,
        v: u64,
        k_head_stride: u32,
        k_token_stride: u32,
        v_head_stride: u32,
        v_token_stride: u32,
        position: i64,
        tokens: u32,
        index: u32,
        queries: u32,
        reserved: u32,
    }

    /// One block's share of the tokens.
    #[derive(PartialEq, Eq)]
    Split { page: u32, token: u32, tokens: u32 }

    #[allow(clippy::struct_field_names, reason = "they are those of the kernels")]
    Heads { num_queries: u32, num_kv_heads: u32, group: u32, head_dim: u32, v_head_dim: u32 }

    Attention {
        heads: Heads,
        window: u32,
        soft_cap: f32,
        q: u64,
        pages: u64,
        splits: u64,
        positions: u64,
    }

    AttendArguments { attention: Attention, o: u64, m: u64, l: u64 }

    MassArguments { attention: Attention, m: u64, l: u64, mass: u64 }

    SummaryArguments { pages: u64, bounds: u64, num_kv_heads: u32, head_dim: u32 }

    BoundArguments {
        heads: Heads,
        factor: f32,
        q: u64,
        pages: u64,
        bounds: u64,
        num_pages: u32,
        most: u64,
    }

    PrepareArguments {
        heads: Heads,
        scale: f32,
        q: u64,
        turns: u64,
        pairs: u32,
        first: u32,
        interleaved: u32,
        prepared: u64,
    }

    MergeArguments {
        o: u64,
        m: u64,
        l: u64,
        sinks: u64,
        merged_o: u64,
        merged_m: u64,
        merged_l: u64,
        parts: u32,
        rows: u32,
        num_qo_heads: u32,
        v_head_dim: u32,
    }
}

const _: () = assert!(size_of::<Page>() == Page::BYTES && size_of::<Split>() == Split::BYTES);

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
        for (name, size, fields) in MIRRORS {
            writeln!(source, "static_assert(sizeof(kvfs::{name}) == {size});").unwrap();
            for (field, offset) in *fields {
                let place = format!("offsetof(kvfs::{name}, {field}) == {offset}");
                writeln!(source, "static_assert({place});").unwrap();
            }
        }
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("layout.cpp");
        std::fs::write(&file, source).unwrap();
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
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
