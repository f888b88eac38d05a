//! Rows and token ids as they are appended: any sizes, at any place. What was taken is there, in pages
//! that equal those that are packed at once, and in the tail; what was refused changed nothing. The second layer has
//! a part beside K and V in its rows, and takes whole ones only.

use std::cell::RefCell;

use kvfs::fs::{FileSystem, FsError, Lookup};
use kvfs::page::{Layer, LayerKind, SideRows, TokenStart, names};
use kvfs::store::record::InodeId;

use super::engine::{Outcome, Target, directory_in_memory};
use super::tree;
use crate::common::{Model, fill};

/// Pages of one sequence at most.
const PAGES_MAX: u64 = 3;

/// A store that is made anew now and then.
struct Host {
    fs: FileSystem,
    sequences: InodeId,
    used: u64,
    _directory: tempfile::TempDir,
}

impl Host {
    fn new(model: &Model) -> Host {
        let directory = directory_in_memory();
        let fs = tree::open(&directory.path().join("store")).unwrap();
        let (sequences, _) = tree::make_sequence(&fs, model);
        Host { fs, sequences, used: 0, _directory: directory }
    }
}

pub(crate) fn target() -> Target {
    let model = Model::with(|fields| {
        fields.page_tokens = 4;
        fields.head_dim = 8;
        let side = SideRows { name: "index_k".to_owned(), row_bytes: 16 };
        fields.layers = Some(vec![LayerKind::Attention, LayerKind::WithSide(side)]);
    });
    let host = RefCell::new(Host::new(&model));
    Target {
        name: "rows",
        length_max: 96,
        seeds: vec![
            vec![0, 128, 0, 128, 0, 255, 1, 1, 0, 1],
            vec![0, 0, 2, 64, 0, 64, 0, 64, 3, 9, 0, 64],
            vec![5, 200, 0, 10, 4, 4],
            // The layer with side rows: whole rows, K and V alone, the row that fills the page.
            vec![0, 16, 0, 16, 0, 32, 0],
            vec![0, 48, 4, 13, 0, 16, 0, 64, 4],
        ],
        words: &[&[0, 64], &[0, 128], &[3, 0], &[0, 16], &[0, 48]],
        allocation_max: 8 << 20,
        run: Box::new(move |input| {
            let mut host = host.borrow_mut();
            if host.used == 200 {
                *host = Host::new(&model);
            }
            host.used += 1;
            append_all(&host, &model, input)
        }),
    }
}

/// Two bytes are one append: what is different about it, and a fifth of how many bytes.
fn append_all(host: &Host, model: &Model, input: &[u8]) -> Outcome {
    let fs = &host.fs;
    let chat = tree::make_directory(fs, host.sequences, &format!("s{}", host.used));
    // What is left of the input when it was taken in steps says which layer.
    let has_side = input.len() % 2 == 1;
    let of_layer = u32::from(has_side);
    let layer = tree::make_directory(fs, chat, &names::format_layer(Layer(of_layer)));
    let row_bytes = model.layer_rows(of_layer, 0, 1).len();
    let tail_bytes = row_bytes * 4;
    tree::write(fs, layer, "0000000.tail", b"");
    let (mut taken, mut refused) = (Vec::new(), 0);
    for (number, step) in (0_u64..).zip(input.chunks_exact(2)) {
        let page = taken.len() / tail_bytes;
        if page as u64 == PAGES_MAX {
            break;
        }
        let bytes = fill(number + 1, usize::from(step[1]) * 5);
        let length = taken.len() % tail_bytes;
        let offset = match step[0] % 8 {
            1 => length as u64 + 1,
            2 => (length as u64).saturating_sub(1),
            3 => u64::MAX - u64::from(step[1]),
            _ => length as u64,
        };
        let fits = length + bytes.len() <= tail_bytes;
        let appends = step[0] % 8 == 4;
        let is_end = appends || offset == length as u64;
        let is_whole = !has_side || (length + bytes.len()).is_multiple_of(row_bytes);
        match append(fs, layer, page as u64 * 4, (offset, &bytes, appends)) {
            Ok(()) => {
                assert!(fits && is_end && is_whole);
                taken.extend(bytes);
            }
            Err(error) => {
                refused += 1;
                let expected = match (is_end, fits) {
                    (false, _) => libc::EPERM,
                    (true, false) => libc::EFBIG,
                    (true, true) => libc::EINVAL,
                };
                assert!(!(fits && is_end && is_whole));
                assert_eq!(error.errno(), expected, "{error}");
            }
        }
    }
    check(fs, (layer, of_layer), model, &taken);
    if taken.is_empty() {
        return Outcome::refused(&format!("nothing appended, refused {}", refused > 0));
    }
    Outcome::accepted((has_side, taken.len() / tail_bytes, refused.min(3), taken.len() % 2))
}

fn append(
    fs: &FileSystem, layer: InodeId, start: u64, (offset, bytes, appends): (u64, &[u8], bool),
) -> Result<(), FsError> {
    let name = names::format_tail(TokenStart(start));
    let Lookup::Found(found) = fs.lookup(layer, name.as_bytes()).unwrap() else {
        panic!("no {name}");
    };
    let inode = found.attributes.inode;
    let handle = fs.open_file(inode, libc::O_RDWR).unwrap().handle;
    let outcome = fs.write(handle, offset, bytes, appends);
    fs.flush(handle).unwrap();
    fs.release(handle).unwrap();
    fs.forget(inode, 1);
    outcome
}

fn check(fs: &FileSystem, (layer, number): (InodeId, u32), model: &Model, taken: &[u8]) {
    let tail_bytes = model.layer_rows(number, 0, 1).len() * 4;
    for (start, rows) in (0..).step_by(4).zip(taken.chunks(tail_bytes)) {
        let start = TokenStart(start);
        let (name, expected) = if rows.len() == tail_bytes {
            let page = kvfs::page::pack_page(&model.place(number, start.0), rows, 4).unwrap();
            (names::format_page(start), page)
        } else {
            (names::format_tail(start), rows.to_vec())
        };
        let Lookup::Found(found) = fs.lookup(layer, name.as_bytes()).unwrap() else {
            panic!("no {name}");
        };
        let handle = fs.open_file(found.attributes.inode, libc::O_RDONLY).unwrap().handle;
        let mut bytes = vec![0; expected.len() + 1];
        let count = fs.read(handle, 0, &mut bytes).unwrap();
        assert!(bytes[..count] == expected, "{name}");
        fs.release(handle).unwrap();
        fs.forget(found.attributes.inode, 1);
    }
}
