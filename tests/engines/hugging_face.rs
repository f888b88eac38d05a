//! Arrays of a Hugging Face cache become pages, and pages arrays: by `examples/python/hf_cache.py`, and
//! from and to safetensors files by `kvfs import` and `kvfs export`.

use std::path::Path;
use std::process::Command;

use kvfs::page::{Layout as PageLayout, PageView};

use crate::common::{Mode, Model, Mount, forks};

in_both_modes!(arrays_become_pages_and_pages_arrays, files_become_pages_and_pages_files);

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

/// Imports what `NumPy` saved under all names in use, compares the pages with it, and what was exported.
const CONVERSIONS: &str = r#"
import subprocess, sys
import numpy as np
from safetensors.numpy import load_file, save_file
sys.path.insert(0, sys.argv[1])
from hf_cache import load_sequence
kvfs, sequences, place = sys.argv[2:]
def run(*words):
    subprocess.run([kvfs, *words], check=True, stdout=subprocess.DEVNULL)
random = np.random.default_rng(7)
# Two sequences of 70 tokens, the first of which was padded to that with 6.
parts = [(layer, is_v, random.standard_normal((2, 2, 70, 16)).astype(np.float16))
         for layer in range(2) for is_v in range(2)]
ids = random.integers(0, 32000, (2, 71))
mask = np.ones_like(ids)
mask[0, :6] = 0
def check(name, row, padding):
    found, layers = load_sequence(f"{sequences}/{name}")
    assert (found == ids[row, padding:70]).all(), name
    for layer, is_v, tensor in parts:
        assert (layers[layer][is_v] == tensor[row : row + 1, :, padding:]).all(), (name, layer, is_v)
names = {
    "new": lambda layer, is_v: f"layers.{layer}.{['keys', 'values'][is_v]}",
    "old": lambda layer, is_v: f"{['key', 'value'][is_v]}_cache.{layer}",
    "exported": lambda layer, is_v: f"past_key_values.{layer}.{['key', 'value'][is_v]}",
}
for name, of in names.items():
    file = f"{place}/{name}.safetensors"
    save_file({of(l, v): t for l, v, t in parts} | {"input_ids": ids, "attention_mask": mask}, file)
    for row, padding in (0, 6), (1, 0):
        run("import", file, f"{sequences}/{name}{row}", "--row", str(row))
        check(f"{name}{row}", row, padding)
# A prompt cache of MLX-LM has one sequence and no ids.
# Its buffers have room for more.
file = f"{place}/mlx.safetensors"
room = np.full((1, 2, 26, 16), np.nan, dtype=np.float16)
parts_mlx = {f"{l}.{v}": np.concatenate([t[1:], room], axis=2) for l, v, t in parts}
lengths = {f"{layer}.2": np.array(70, dtype=np.int32) for layer in range(2)}
save_file(parts_mlx | lengths, file, {"1.0": "KVCache"})
ids[1, :70].astype("<u4").tofile(f"{place}/ids")
run("import", file, f"{sequences}/mlx", "--tokens", f"{place}/ids")
check("mlx", 1, 0)
# Back: the same tensors, byte for byte, from pages and a tail.
file = f"{place}/back.safetensors"
run("export", f"{sequences}/new1", file)
found = load_file(file)
assert found.pop("input_ids").tolist() == ids[1:, :70].tolist()
assert {name: t.tobytes() for name, t in found.items()} == {
    names["new"](l, v): t[1:].tobytes() for l, v, t in parts}
assert all(t.shape == (1, 2, 70, 16) for t in found.values())
run("import", file, f"{sequences}/again")
check("again", 1, 0)
print("done")
"#;

fn files_become_pages_and_pages_files(mode: Mode) {
    require!(safetensors);
    let (mount, directory) = (Mount::new(mode), tempfile::tempdir().unwrap());
    for layout in [PageLayout::Hnd, PageLayout::Nhd] {
        let name = if layout == PageLayout::Hnd { "hnd" } else { "nhd" };
        let model = Model::with(|fields| fields.layout = layout).named(name);
        model.install(&mount);
        let mut program = Command::new(crate::python());
        program.args(["-c", CONVERSIONS]).arg(crate::in_repository("examples/python"));
        program.arg(env!("CARGO_BIN_EXE_kvfs")).arg(model.directory(&mount).join("sequences"));
        assert_eq!(forks::succeed(program.arg(directory.path())), "done\n");
    }
    assert_eq!(mount.errors(), [] as [String; 0]);
}

#[test]
fn what_cannot_be_converted_is_refused_in_a_line() {
    require!(fuse);
    let (mount, model) = (Mount::new(Mode::Passthrough), Model::small());
    model.install(&mount);
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    std::fs::write(file("empty.safetensors"), b"\x02\0\0\0\0\0\0\0{}").unwrap();
    std::fs::write(file("slot"), b"ggsq").unwrap();
    std::fs::create_dir_all(model.sequence(&mount, "empty")).unwrap();
    let (there, new) = (model.sequence(&mount, "empty"), model.sequence(&mount, "new"));
    let check = |words: &[&Path], code: i32, line: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_kvfs")).args(words).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), error.lines().count()), (Some(code), 1), "{error}");
        assert!(error.contains(line), "{error}");
        assert!(!new.exists(), "half a sequence is left");
    };
    let [import, export, row, version] =
        ["import", "export", "--row=1", "--slot-version=3"].map(Path::new);
    check(&[import, &file("empty.safetensors"), &new], 1, "named like layers.0.keys");
    check(&[import, &file("slot"), &new, row], 1, "is no safetensors file");
    check(&[import, &file("nothing"), &new], 1, "No such file");
    check(&[export, &there, &file("x.safetensors")], 1, "has no tokens");
    check(&[export, &there, &file("x.safetensors"), version], 2, "no form of llama.cpp");
    assert!(!file("x.safetensors").exists() && !file("x.safetensors.tmp").exists());
}
