//! Python reads and writes pages as the safetensors files that they are, and computes the checksum
//! by the formula that is documented.

use std::process::Command;

use crate::common::sys::{getxattr, rename};
use crate::common::{Mode, Model, Mount, forks};

in_both_modes!(python_reads_a_page, python_writes_a_page);

/// Prints shapes, dtype, one element of each tensor, and the checksum by the documented formula.
const READ: &str = r#"
import sys, xxhash
from safetensors.numpy import load_file
path, model, layer, start = sys.argv[1:]
page = load_file(path)
k, v = page["k"], page["v"]
payload = open(path, "rb").read()[4096:]
line = f"kvfs-page-v1 model={model} layer={layer} start={start} tokens={k.shape[1]} dtype=f16\n"
checksum = xxhash.xxh3_128(line.encode() + xxhash.xxh3_128(payload).digest()).hexdigest()
print(k.shape, v.shape, k.dtype, k[1, 2, 3].tobytes().hex(), v[0, 5, 7].tobytes().hex(), checksum)
"#;

/// Writes a page with nothing but json, struct and numpy, under a temporary name.
const WRITE: &str = r#"
import json, os, struct, sys
import numpy as np
path, heads, tokens, dim, dim_v = sys.argv[1], *map(int, sys.argv[2:])
k = np.arange(heads * tokens * dim, dtype=np.float16).reshape(heads, tokens, dim)
v = -np.arange(heads * tokens * dim_v, dtype=np.float16).reshape(heads, tokens, dim_v)
body = k.tobytes() + v.tobytes()
tensor = lambda t, at: {"dtype": "F16", "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
header = {"k": tensor(k, 0), "v": tensor(v, k.nbytes)}
pad = -len(body) % 4096
if pad:
    header["_pad"] = {"dtype": "U8", "shape": [pad], "data_offsets": [len(body), len(body) + pad]}
text = json.dumps(header).encode().ljust(4088)
with open(path, "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text + body + bytes(pad))
"#;

fn python(script: &str, arguments: &[String]) -> String {
    let program = std::env::var("KVFS_TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    forks::succeed(Command::new(program).args(["-c", script]).args(arguments))
}

fn hex(row: &[u8], element: usize) -> String {
    format!("{:02x}{:02x}", row[2 * element], row[2 * element + 1])
}

fn python_reads_a_page(mode: Mode) {
    require!(safetensors);
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    let path = model.page_path(&mount, "chat", 0, 0);
    let file = model.page(0, 0, 1);
    std::fs::write(path.with_extension("tmp"), &file).unwrap();
    rename(path.with_extension("tmp"), &path).unwrap();
    let place = model.place(0, 0);
    let geometry = place.geometry();
    let view = kvfs::page::PageView::parse(&file, geometry).unwrap();
    let identity = place.identity(model.page_tokens()).model.to_string();
    let path_text = path.display().to_string();
    let printed = python(READ, &[path_text, identity, "0".to_owned(), "0".to_owned()]);
    let shape = |dim| format!("({}, {}, {dim})", geometry.num_kv_heads(), model.page_tokens());
    let expected = format!(
        "{} {} float16 {} {} {}\n",
        shape(geometry.head_dim()),
        shape(geometry.v_head_dim()),
        hex(view.k_row(1, 2), 3),
        hex(view.v_row(0, 5), 7),
        getxattr(&path, "user.kvfs.checksum").unwrap(),
    );
    assert_eq!(printed, expected);
}

fn python_writes_a_page(mode: Mode) {
    require!(safetensors);
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    let path = model.page_path(&mount, "chat", 1, 0);
    let temporary = path.with_extension("tmp");
    let place = model.place(1, 0);
    let geometry = place.geometry();
    let numbers =
        [geometry.num_kv_heads(), model.page_tokens(), geometry.head_dim(), geometry.v_head_dim()];
    let mut arguments = vec![temporary.display().to_string()];
    arguments.extend(numbers.map(|number| number.to_string()));
    python(WRITE, &arguments);
    rename(&temporary, &path).unwrap();
    let file = std::fs::read(&path).unwrap();
    let view = kvfs::page::PageView::parse(&file, geometry).unwrap();
    // Element [0, 0, 5] is 5.0 in f16.
    assert_eq!(hex(view.k_row(0, 0), 5), "0045");
    assert_eq!(hex(view.v_row(0, 0), 5), "00c5");
    assert_eq!(model.checksum(1, 0, &file), getxattr(&path, "user.kvfs.checksum").unwrap());
    assert_eq!(mount.errors(), [] as [String; 0]);
}
