//! Tails and token files grow at their end only; a full tail becomes a page.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use kvfs::page::{Dtype, Layout};

use crate::common::sys::{
    assert_errno, close, getxattr, open, pwrite, rename, set_modified, sync_directory, write,
    write_and_close,
};
use crate::common::{Mode, Model, Mount, fill};

in_both_modes!(
    rows_are_appended,
    an_append_across_the_border_writes_nothing,
    filling_seals,
    rows_that_were_removed_do_not_grow,
    a_page_is_listed_at_once,
    every_geometry_seals,
    a_tail_stands_where_a_page_could,
    truncating_to_nothing,
    renaming_replaces_the_rows,
    a_restored_tail_keeps_its_time,
    a_full_tail_by_rename_seals_at_once,
    tokens_are_appended,
    appenders_do_not_tear_rows,
);

const APPEND: i32 = libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND;

fn prepared(mode: Mode, model: &Model) -> Mount {
    let mount = Mount::new(mode);
    model.install(&mount);
    mount
}

/// The page that rows become, written out by hand: `K` of all tokens, then `V`, in the layout's
/// order of heads and tokens.
fn transposed(model: &Model, rows: &[u8], tokens: usize) -> Vec<u8> {
    let geometry = model.manifest.geometry();
    let heads = geometry.num_kv_heads() as usize;
    let sizes = [geometry.k_row_bytes(), geometry.v_row_bytes()];
    let [k, v] = sizes.map(|bytes| usize::try_from(bytes).unwrap());
    let row_bytes = heads * (k + v);
    let mut payload = Vec::new();
    for (in_row, bytes) in [(0, k), (heads * k, v)] {
        let mut piece = |head: usize, token: usize| {
            let at = token * row_bytes + in_row + head * bytes;
            payload.extend_from_slice(&rows[at..at + bytes]);
        };
        match geometry.layout() {
            Layout::Hnd => (0..heads).for_each(|h| (0..tokens).for_each(|t| piece(h, t))),
            Layout::Nhd => (0..tokens).for_each(|t| (0..heads).for_each(|h| piece(h, t))),
        }
    }
    payload
}

fn rows_are_appended(mode: Mode) {
    let model = Model::small();
    let mount = prepared(mode, &model);
    let path = model.tail_path(&mount, "chat", 0, 0);
    let rows = model.rows(1, 8);
    let row = model.row_bytes();

    let appender = open(&path, APPEND).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
    assert_eq!(write(&appender, &rows[..row]).unwrap(), row);
    // Whoever looks sees it at once.
    assert!(std::fs::read(&path).unwrap() == rows[..row]);
    // O_APPEND appends, whatever offset pwrite gives.
    assert_eq!(pwrite(&appender, &rows[row..2 * row], 0).unwrap(), row);
    assert!(std::fs::read(&path).unwrap() == rows[..2 * row]);

    let writer = open(&path, libc::O_RDWR).unwrap();
    let end = i64::try_from(2 * row).unwrap();
    for elsewhere in [0, 1, end - 1, end + 1, 2 * end] {
        let outcome = pwrite(&writer, &rows[..row], elsewhere);
        assert_errno(outcome, libc::EPERM);
    }
    assert_eq!(pwrite(&writer, &rows[2 * row..4 * row], end).unwrap(), 2 * row);
    // A part of a row is taken as well: a pipe need not care for rows.
    writer.write_all_at(&rows[4 * row..4 * row + 10], 4 * row as u64).unwrap();
    write(&appender, &rows[4 * row + 10..]).unwrap();
    let mut found = vec![0; rows.len()];
    writer.read_exact_at(&mut found, 0).unwrap();
    assert!(found == rows);
    assert_eq!(writer.metadata().unwrap().len(), rows.len() as u64);
    close(writer).unwrap();
    close(appender).unwrap();
    assert!(std::fs::read(&path).unwrap() == rows);
    assert_errno(nix::unistd::truncate(&path, 10).map_err(Into::into), libc::EPERM);
    assert_errno(nix::unistd::truncate(&path, 1 << 20).map_err(Into::into), libc::EPERM);
    assert!(std::fs::read(&path).unwrap() == rows);
}

fn an_append_across_the_border_writes_nothing(mode: Mode) {
    let model = Model::small();
    let mount = prepared(mode, &model);
    let path = model.tail_path(&mount, "chat", 0, 0);
    let rows = model.rows(1, 33);
    let row = model.row_bytes();
    let tail = open(&path, APPEND).unwrap();
    assert_errno(write(&tail, &rows), libc::EFBIG);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
    write(&tail, &rows[..30 * row]).unwrap();
    assert_errno(write(&tail, &rows[30 * row..]), libc::EFBIG);
    assert_errno(write(&tail, &rows[30 * row..=32 * row]), libc::EFBIG);
    assert!(std::fs::read(&path).unwrap() == rows[..30 * row]);
    write(&tail, &rows[30 * row..32 * row]).unwrap();
    assert_errno(std::fs::metadata(&path), libc::ENOENT);
    assert!(model.page_path(&mount, "chat", 0, 0).exists());
}

fn rows_that_were_removed_do_not_grow(mode: Mode) {
    let model = Model::small();
    let mount = prepared(mode, &model);
    let path = model.tail_path(&mount, "chat", 0, 0);
    let rows = model.rows(1, 32);
    let some = &rows[..5 * model.row_bytes()];
    let tokens = open(model.tokens_path(&mount, "chat"), APPEND).unwrap();
    write(&tokens, &[1; 4]).unwrap();
    let tail = open(&path, APPEND).unwrap();
    write(&tail, some).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_errno(write(&tail, some), libc::ESTALE);
    // Another one has the name now.
    let tail = open(&path, APPEND).unwrap();
    write(&tail, some).unwrap();
    std::fs::remove_dir_all(path.parent().unwrap().parent().unwrap()).unwrap();
    assert_errno(write(&tail, some), libc::ESTALE);
    assert_errno(write(&tokens, &[1; 4]), libc::ESTALE);
}

fn filling_seals(mode: Mode) {
    let model = Model::small();
    let mount = prepared(mode, &model);
    let tail_path = model.tail_path(&mount, "chat", 1, 32);
    let rows = model.rows(1, 32);
    let tail = open(&tail_path, APPEND).unwrap();
    let old = std::fs::metadata(&tail_path).unwrap();
    for row in rows.chunks(model.row_bytes()) {
        write(&tail, row).unwrap();
    }
    assert_errno(std::fs::metadata(&tail_path), libc::ENOENT);
    let page_path = model.page_path(&mount, "chat", 1, 32);
    let page = std::fs::read(&page_path).unwrap();
    assert!(page == model.page(1, 32, 1));
    assert!(page[4096..] == transposed(&model, &rows, 32));
    let checksum = getxattr(&page_path, "user.kvfs.checksum").unwrap();
    assert_eq!(checksum, model.checksum(1, 32, &page));
    let sealed = std::fs::metadata(&page_path).unwrap();
    assert_ne!(sealed.ino(), old.ino());
    assert_eq!(sealed.mode(), old.mode());
    assert_errno(open(&page_path, libc::O_WRONLY), libc::EPERM);

    let next = model.tail_path(&mount, "chat", 1, 64);
    let stat = std::fs::metadata(&next).unwrap();
    assert_eq!((stat.len(), stat.mode()), (0, old.mode()));
    assert_eq!(std::fs::read(&next).unwrap(), b"");
    // The old descriptor has nothing to append to.
    assert_errno(write(&tail, &rows[..model.row_bytes()]), libc::EFBIG);
    assert_eq!(std::fs::metadata(&next).unwrap().len(), 0);
    let mut found = vec![0; rows.len()];
    open(&next, APPEND).unwrap();
    drop(tail);
    // Going on with the next.
    let tail = open(&next, libc::O_RDWR | libc::O_APPEND).unwrap();
    write(&tail, &rows).unwrap();
    tail.read_exact_at(&mut found, 0).unwrap();
    assert!(found == rows);
    assert!(std::fs::read(model.page_path(&mount, "chat", 1, 64)).unwrap() == model.page(1, 64, 1));
    assert_eq!(
        names(&model, &mount, 1),
        ["0000032.safetensors", "0000064.safetensors", "0000096.tail",]
    );
    assert_eq!(mount.errors(), [] as [String; 0]);
}

/// Names in a layer of the sequence `chat`.
fn names(model: &Model, mount: &Mount, layer: u32) -> Vec<String> {
    let entries = std::fs::read_dir(model.layer(mount, "chat", layer)).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn a_page_is_listed_at_once(mode: Mode) {
    let model = Model::small();
    let mount = prepared(mode, &model);
    let layer = model.layer(&mount, "chat", 0);
    let listed = || -> Vec<_> {
        let mut names: Vec<_> =
            std::fs::read_dir(&layer).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let tokens = model.manifest.geometry().page_tokens();
    for start in (0..64).map(|page| page * u64::from(tokens)) {
        let path = model.tail_path(&mount, "chat", 0, start);
        let tail = open(&path, APPEND).unwrap();
        write(&tail, &model.rows(start, tokens - 1)).unwrap();
        let name = path.file_name().unwrap().to_owned();
        assert_eq!(listed().last(), Some(&name));
        write(&tail, &model.rows(start + u64::from(tokens) - 1, 1)).unwrap();
        let page = model.page_path(&mount, "chat", 0, start).file_name().unwrap().to_owned();
        let names = listed();
        assert!(names.contains(&page) && !names.contains(&name), "{names:?}");
    }
}

fn every_geometry_seals(mode: Mode) {
    let mount = Mount::new(mode);
    let mut number = 0;
    let mut check = |dtype: Dtype, layout: Layout, dims: (u32, u32), page_tokens: u32| {
        number += 1;
        let model = Model::with(|fields| {
            fields.dtype = dtype;
            fields.layout = layout;
            fields.head_dim = dims.0;
            fields.v_head_dim = Some(dims.1);
            fields.page_tokens = page_tokens;
            fields.num_kv_heads = 3;
        })
        .named(&format!("model{number}"));
        model.install(&mount);
        let rows = model.rows(number, page_tokens);
        let tail = open(model.tail_path(&mount, "chat", 0, 0), APPEND).unwrap();
        write(&tail, &rows[..rows.len() / 2]).unwrap();
        write(&tail, &rows[rows.len() / 2..]).unwrap();
        let path = model.page_path(&mount, "chat", 0, 0);
        let page = std::fs::read(&path).unwrap();
        let expected = transposed(&model, &rows, page_tokens as usize);
        assert!(page[4096..4096 + expected.len()] == expected, "{model:?}");
        assert_eq!(page.len() % 4096, 0);
        assert!(page[4096 + expected.len()..].iter().all(|byte| *byte == 0));
        assert!(page == model.page(0, 0, number));
        // The same file comes in by rename, and a short last page too.
        let short = model.short_page(0, page_tokens.into(), number, 1);
        write_and_close(mount.files("short"), &short).unwrap();
        let path = model.page_path(&mount, "chat", 0, page_tokens.into());
        // The tail that was opened for it has no rows.
        std::fs::remove_file(path.with_extension("tail")).unwrap();
        rename(mount.files("short"), &path).unwrap();
        assert!(std::fs::read(&path).unwrap() == short);
    };
    for dtype in Dtype::ALL {
        check(dtype, Layout::Hnd, (32, 32), 16);
        check(dtype, Layout::Nhd, (32, 32), 16);
    }
    check(Dtype::F16, Layout::Hnd, (64, 0), 16);
    check(Dtype::F16, Layout::Nhd, (64, 0), 16);
    check(Dtype::F32, Layout::Hnd, (48, 20), 7);
    check(Dtype::Bf16, Layout::Nhd, (6, 10), 544);
    check(Dtype::F8E4m3, Layout::Hnd, (1, 1), 1);
    assert_eq!(mount.errors(), [] as [String; 0]);
}

fn a_tail_stands_where_a_page_could(mode: Mode) {
    let model = Model::small();
    let mount = prepared(mode, &model);
    let path = |layer, start| model.tail_path(&mount, "chat", layer, start);
    assert_errno(open(path(0, 5), APPEND), libc::EINVAL);
    assert_errno(open(path(2, 0), APPEND), libc::EINVAL);
    let errors = mount.errors();
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert!(errors[0].contains("chat/000/0000005.tail"), "{errors:?}");
    assert!(errors[1].contains("chat/002/0000000.tail"), "{errors:?}");
    let page = model.page_path(&mount, "chat", 0, 0);
    write_and_close(&page, &model.page(0, 0, 1)).unwrap();
    assert_errno(open(path(0, 0), APPEND), libc::EEXIST);
    write_and_close(mount.files("rows"), &model.rows(1, 1)).unwrap();
    assert_errno(rename(mount.files("rows"), path(0, 0)), libc::EEXIST);
    rename(mount.files("rows"), path(0, 32)).unwrap();
}

fn truncating_to_nothing(mode: Mode) {
    let model = Model::small();
    let mount = prepared(mode, &model);
    let path = model.tail_path(&mount, "chat", 0, 0);
    let rows = model.rows(1, 3);
    write_and_close(&path, &rows).unwrap();
    nix::unistd::truncate(&path, 0).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
    let tail = open(&path, libc::O_WRONLY).unwrap();
    assert_eq!(pwrite(&tail, &rows, 0).unwrap(), rows.len());
    drop(tail);
    let tail = open(&path, libc::O_WRONLY | libc::O_TRUNC).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
    assert_eq!(pwrite(&tail, &rows[..10], 0).unwrap(), 10);
    assert!(std::fs::read(&path).unwrap() == rows[..10]);
}

fn renaming_replaces_the_rows(mode: Mode) {
    let model = Model::small();
    let mount = prepared(mode, &model);
    let path = model.tail_path(&mount, "chat", 0, 0);
    write_and_close(&path, &model.rows(1, 3)).unwrap();
    let old = open(&path, libc::O_RDONLY).unwrap();
    let rows = model.rows(2, 5);
    let temporary = path.with_file_name(".0000000.tail.q1");
    write_and_close(&temporary, &rows).unwrap();
    rename(&temporary, &path).unwrap();
    assert!(std::fs::read(&path).unwrap() == rows);
    assert_errno(std::fs::metadata(&temporary), libc::ENOENT);
    let mut found = vec![0; model.row_bytes() * 3];
    old.read_exact_at(&mut found, 0).unwrap();
    assert!(found == model.rows(1, 3));
    // It is a tail again.
    let tail = open(&path, libc::O_WRONLY | libc::O_APPEND).unwrap();
    write(&tail, &model.rows(3, 1)).unwrap();
    assert_errno(pwrite(&open(&path, libc::O_WRONLY).unwrap(), b"x", 0), libc::EPERM);

    for (length, why) in [(10, "no whole row"), (33 * 128, "more than a page")] {
        write_and_close(mount.files("wrong"), &fill(1, length)).unwrap();
        let outcome = rename(mount.files("wrong"), &path);
        assert_errno(outcome, libc::EINVAL);
        std::fs::remove_file(mount.files("wrong")).expect(why);
    }
    let errors = mount.errors();
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert!(errors.iter().all(|line| line.contains("chat/000/0000000.tail")));
    assert!(std::fs::read(&path).unwrap() == [rows, model.rows(3, 1)].concat());
}

fn a_restored_tail_keeps_its_time(mode: Mode) {
    let model = Model::small();
    let mut mount = prepared(mode, &model);
    let time = std::time::UNIX_EPOCH + std::time::Duration::new(1_000_000_000, 123_456_789);
    let tail = model.tail_path(&mount, "chat", 0, 0);
    let tokens = model.tokens_path(&mount, "chat");
    for (path, bytes) in [(&tail, model.rows(1, 3)), (&tokens, fill(1, 12))] {
        // rsync sets the time when it has closed the file: at rest or not, as it happens.
        for wait_for_rest in [false, true] {
            let temporary = path.with_file_name(".restored.q1");
            write_and_close(&temporary, &bytes).unwrap();
            if wait_for_rest {
                sync_directory(mount.path()).unwrap();
            }
            set_modified(&temporary, time).unwrap();
            rename(&temporary, path).unwrap();
            let modified = std::fs::metadata(path).unwrap().modified().unwrap();
            assert_eq!(modified, time, "{}, {wait_for_rest}", path.display());
        }
    }
    mount.remount();
    for path in [&tail, &tokens] {
        let modified = std::fs::metadata(path).unwrap().modified().unwrap();
        assert_eq!(modified, time, "{}", path.display());
    }
}

fn a_full_tail_by_rename_seals_at_once(mode: Mode) {
    let model = Model::small();
    let mount = prepared(mode, &model);
    let path = model.tail_path(&mount, "chat", 0, 0);
    write_and_close(&path, &model.rows(1, 3)).unwrap();
    write_and_close(mount.files("full"), &model.rows(2, 32)).unwrap();
    rename(mount.files("full"), &path).unwrap();
    assert_eq!(names(&model, &mount, 0), ["0000000.safetensors", "0000032.tail"]);
    let page = std::fs::read(model.page_path(&mount, "chat", 0, 0)).unwrap();
    assert!(page == model.page(0, 0, 2));
    assert_errno(std::fs::metadata(mount.files("full")), libc::ENOENT);
}

fn tokens_are_appended(mode: Mode) {
    let model = Model::small();
    let mount = prepared(mode, &model);
    let path = model.tokens_path(&mount, "chat");
    let ids = fill(1, 400);
    let tokens = open(&path, APPEND).unwrap();
    write(&tokens, &ids[..40]).unwrap();
    write(&tokens, &ids[40..80]).unwrap();
    let writer = open(&path, libc::O_RDWR).unwrap();
    assert_errno(pwrite(&writer, b"abcd", 0), libc::EPERM);
    assert_errno(pwrite(&writer, b"abcd", 84), libc::EPERM);
    assert_eq!(pwrite(&writer, &ids[80..], 80).unwrap(), 320);
    assert!(std::fs::read(&path).unwrap() == ids);
    let other = fill(2, 44);
    write_and_close(path.with_file_name(".tokens.q1"), &other).unwrap();
    rename(path.with_file_name(".tokens.q1"), &path).unwrap();
    assert!(std::fs::read(&path).unwrap() == other);
    write_and_close(path.with_file_name(".tokens.q2"), &other[..43]).unwrap();
    let outcome = rename(path.with_file_name(".tokens.q2"), &path);
    assert_errno(outcome, libc::EINVAL);
    assert!(std::fs::read(&path).unwrap() == other);
    drop((tokens, writer));
    let mut mount = mount;
    mount.remount();
    assert!(std::fs::read(&path).unwrap() == other);
}

fn appenders_do_not_tear_rows(mode: Mode) {
    let model = Model::with(|fields| fields.page_tokens = 512);
    let mount = prepared(mode, &model);
    let path = model.tail_path(&mount, "chat", 0, 0);
    let row = model.row_bytes();
    std::thread::scope(|scope| {
        for writer in 0..4_u8 {
            let (path, row) = (path.clone(), row);
            scope.spawn(move || {
                let tail = open(&path, APPEND).unwrap();
                for _ in 0..100 {
                    assert_eq!(write(&tail, &vec![writer; row]).unwrap(), row);
                }
            });
        }
    });
    let found = std::fs::read(&path).unwrap();
    assert_eq!(found.len(), 400 * row);
    for row in found.chunks(row) {
        assert!(row.iter().all(|byte| *byte == row[0]));
    }
    sync_directory(mount.path()).unwrap();
    let objects: Vec<PathBuf> = mount.staging();
    assert_eq!(objects, [] as [PathBuf; 0]);
}
