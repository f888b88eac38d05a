//! `examples/python/hf_cache.py`: arrays of a Hugging Face cache become pages, and pages arrays.

use std::process::Command;

use kvfs::page::PageView;

use crate::common::{Mode, Model, Mount, forks};

in_both_modes!(arrays_become_pages_and_pages_arrays);

/// Saves random arrays, loads them again, and prints elements that Rust looks up in the pages.
const PROGRAM: &str = r#"
import sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from hf_cache import load_sequence, save_sequence
sequences, tail = sys.argv[2:]
random = np.random.default_rng(7)
tokens = random.integers(0, 32000, 70)
layers = [tuple(random.standard_normal((1, 2, 70, 16)).astype(np.float16) for _ in "kv") for _ in range(2)]
save_sequence(sequences + "/saved", tokens, layers)
found, pages = load_sequence(sequences + "/saved")
assert (found == tokens).all() and len(pages) == 2
for (k, v), (page_k, page_v) in zip(layers, pages):
    assert k.shape == page_k.shape and (k == page_k).all() and (v == page_v).all()
# A sequence that still grows: one page and a tail of 8 rows.
found, pages = load_sequence(sequences + "/" + tail)
assert len(found) == 40 and all(k.shape == (1, 2, 40, 16) for k, _ in pages)
k, v = layers[1]
print(k[0, 1, 65, 3].tobytes().hex(), v[0, 0, 33, 15].tobytes().hex(), pages[0][0][0, 1, 39, 2].tobytes().hex())
"#;

fn hex(row: &[u8], element: usize) -> String {
    format!("{:02x}{:02x}", row[2 * element], row[2 * element + 1])
}

fn arrays_become_pages_and_pages_arrays(mode: Mode) {
    require!(safetensors);
    let (mount, model) = (Mount::new(mode), Model::small());
    model.install(&mount);
    let rows = model.rows(3, 40);
    let (page, rest) = rows.split_at(32 * model.row_bytes());
    for layer in 0..2 {
        std::fs::write(model.tail_path(&mount, "growing", layer, 0), page).unwrap();
        std::fs::write(model.tail_path(&mount, "growing", layer, 32), rest).unwrap();
    }
    std::fs::write(model.tokens_path(&mount, "growing"), [0; 40 * 4]).unwrap();
    let mut program = Command::new(crate::python());
    program.args(["-c", PROGRAM]).arg(crate::in_repository("examples/python"));
    program.arg(model.directory(&mount).join("sequences")).arg("growing");
    let printed = forks::succeed(&mut program);
    let read =
        |layer, start| std::fs::read(model.page_path(&mount, "saved", layer, start)).unwrap();
    let (last, middle) = (read(1, 64), read(1, 32));
    let geometry = model.manifest.geometry();
    let [last, middle] = [&last, &middle].map(|page| PageView::parse(page, geometry).unwrap());
    let row = &rest[7 * model.row_bytes()..];
    let expected = format!(
        "{} {} {}\n",
        hex(last.k_row(1, 1), 3),
        hex(middle.v_row(0, 1), 15),
        hex(&row[16 * 2..], 2),
    );
    assert_eq!(printed, expected);
    assert_eq!(mount.errors(), [] as [String; 0]);
}
