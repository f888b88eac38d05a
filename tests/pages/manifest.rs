//! `manifest.json`: written once, then like a page.

use std::os::unix::fs::MetadataExt;

use kvfs::page::Dtype;

use crate::common::sys::{assert_errno, getxattr, open, rename, sync_directory, write_and_close};
use crate::common::{Mode, Model, Mount};

in_both_modes!(
    it_is_sealed,
    it_may_change_until_there_are_sequences,
    afterwards_only_notes_may_change,
    models_do_not_share_it,
);

fn it_is_sealed(mode: Mode) {
    let mut mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    let path = model.directory(&mount).join("manifest.json");
    let text = model.manifest.to_json();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    for flags in [libc::O_WRONLY, libc::O_RDWR, libc::O_WRONLY | libc::O_TRUNC] {
        assert_errno(open(&path, flags), libc::EPERM);
    }
    let truncated = nix::unistd::truncate(&path, 0);
    assert_errno(truncated.map_err(Into::into), libc::EPERM);
    let expected = kvfs::page::content_checksum(text.as_bytes()).to_string();
    assert_eq!(getxattr(&path, "user.kvfs.checksum").unwrap(), expected);
    sync_directory(mount.path()).unwrap();
    mount.crash();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    // The same again is dropped.
    let before = std::fs::metadata(&path).unwrap();
    write_and_close(mount.files("m"), text.as_bytes()).unwrap();
    rename(mount.files("m"), &path).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), before.len());
    assert_eq!(std::fs::metadata(&path).unwrap().nlink(), 1);
}

fn it_may_change_until_there_are_sequences(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    let other = Model::with(|fields| fields.dtype = Dtype::Bf16);
    let path = model.directory(&mount).join("manifest.json");
    write_and_close(mount.files("m"), other.manifest.to_json().as_bytes()).unwrap();
    rename(mount.files("m"), &path).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), other.manifest.to_json());
    // Pages are checked against the new one.
    let page = model.page_path(&mount, "chat", 0, 0);
    assert_errno(write_and_close(&page, &model.page(0, 0, 1)), libc::EINVAL);
    write_and_close(&page, &other.page(0, 0, 1)).unwrap();
    assert!(page.exists());
}

fn afterwards_only_notes_may_change(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    let page = model.page_path(&mount, "chat", 0, 0);
    write_and_close(&page, &model.page(0, 0, 1)).unwrap();
    let path = model.directory(&mount).join("manifest.json");
    let text = model.manifest.to_json();
    let other = Model::with(|fields| fields.head_dim = 32);
    write_and_close(mount.files("m"), other.manifest.to_json().as_bytes()).unwrap();
    assert_errno(rename(mount.files("m"), &path), libc::EINVAL);
    let errors = mount.errors();
    assert_eq!(errors.len(), 1, "{errors:#?}");
    assert!(errors[0].contains("models/small/manifest.json: "), "{errors:#?}");
    assert!(errors[0].contains("written once"), "{errors:#?}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    // Who wrote the pages is a note.
    let noted = Model::with(|fields| fields.engine = Some("test".to_owned()));
    write_and_close(mount.files("n"), noted.manifest.to_json().as_bytes()).unwrap();
    rename(mount.files("n"), &path).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), noted.manifest.to_json());
    assert!(std::fs::read(&page).unwrap() == model.page(0, 0, 1));
    let next = model.page_path(&mount, "chat", 0, 32);
    write_and_close(&next, &model.page(0, 32, 1)).unwrap();
    assert!(next.exists());
}

fn models_do_not_share_it(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    let other = Model::small().named("other");
    std::fs::create_dir(other.directory(&mount)).unwrap();
    let from = model.directory(&mount).join("manifest.json");
    let to = other.directory(&mount).join("manifest.json");
    std::fs::hard_link(&from, &to).unwrap();
    assert_eq!(std::fs::metadata(&to).unwrap().nlink(), 2);
    let page = other.page_path(&mount, "chat", 0, 0);
    write_and_close(&page, &other.page(0, 0, 1)).unwrap();
    assert!(page.exists());
    std::fs::remove_file(&from).unwrap();
    let page = model.page_path(&mount, "chat", 0, 0);
    assert_errno(write_and_close(&page, &model.page(0, 0, 1)), libc::EINVAL);
}
