//! Pages that change while a program in C has them mapped, and values that are no numbers.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

use half::f16;
use kvfs::page::{names, pack_page};

use crate::common::mount::scratch_directory;
use crate::common::{Mode, Model, Mount, sys};
use crate::program::{Link, build};

const LAYER: u32 = 1;
const START: u64 = 64;

/// A page of which every value is the same: so is each value of the result.
fn page(model: &Model, value: f16) -> Vec<u8> {
    let tokens = model.page_tokens();
    let rows: Vec<u8> =
        value.to_le_bytes().repeat(model.row_bytes() / size_of::<f16>() * tokens as usize);
    pack_page(&model.place(LAYER, START), &rows, tokens).unwrap()
}

struct Program {
    child: Child,
}

impl Program {
    /// What it finds in its mapping and under the name.
    fn ask(&mut self) -> String {
        writeln!(self.child.stdin.as_mut().unwrap()).unwrap();
        let mut line = String::new();
        BufReader::new(self.child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // The end of its input ends it.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

#[test]
fn a_mapped_page_outlives_its_file_and_its_mount() {
    require!(cc, fuse, root);
    let directory = scratch_directory();
    let program = build("tests/c_abi/held.c", Link::Shared, directory.path());
    let mut mount = Mount::with_options(Mode::Passthrough, &["--ram", "64M"]);
    let model = Model::small();
    model.install(&mount);
    let path = model.page_path(&mount, "chat", LAYER, START);
    let publish = |value: f32| {
        let temporary = path.with_extension("tmp");
        sys::write_and_close(&temporary, &page(&model, f16::from_f32(value))).unwrap();
        sys::rename(temporary, &path).unwrap();
    };
    publish(0.5);
    let hold = || {
        let mut command = Command::new(&program);
        command.arg(model.directory(&mount).join(names::MANIFEST));
        command.args([LAYER.to_string(), START.to_string()]).arg(&path);
        Program { child: command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap() }
    };
    let mut first = hold();
    assert_eq!(first.ask(), "0 0 0.5 0 0 0.5");
    publish(0.25);
    assert_eq!(first.ask(), "0 0 0.5 0 0 0.25");
    // Values that are no numbers are data: they reach the result and nothing else.
    publish(f32::NAN);
    assert_eq!(first.ask(), "0 0 0.5 0 0 nan");
    publish(f32::INFINITY);
    let mut second = hold();
    assert_eq!(second.ask(), "0 0 nan 0 0 nan");
    std::fs::remove_file(&path).unwrap();
    assert_eq!(first.ask(), "0 0 0.5 No such file or directory");
    drop(second);
    mount.kill();
    assert_eq!(first.ask(), "0 0 0.5 Transport endpoint is not connected");
}
