//! What only a directory can do wrong.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kvfs::tier::remote::directory::Directory;
use kvfs::tier::remote::{
    BlobStore, Options, PutMode, Remote, RemoteError, RemotePrefix, RemoteSpec, Sequence, Source,
    State, StoreId, attach,
};

use crate::common::nfs::Nfs;
use crate::place::{Place, WHOLE, bytes, get, named, put, refusal};

const PATIENCE: Duration = Duration::from_secs(20);

#[test]
fn behaves_as_every_remote() {
    crate::suite::run(Place::directory);
}

#[test]
fn behaves_so_on_nfs_too() {
    crate::require!(nfs);
    let nfs = Nfs::mount();
    crate::suite::run(|| Place::below(nfs.path()));
}

/// How opening a directory as a remote fails.
fn refusal_of(path: &Path) -> RemoteError {
    let remote = Remote::open(&RemoteSpec::Directory(path.to_owned()), Options::default()).unwrap();
    refusal(&remote)
}

#[test]
fn a_place_that_is_missing_foreign_or_no_directory_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let missing = refusal_of(&directory.path().join("missing"));
    assert!(matches!(missing, RemoteError::Unreachable(_)), "{missing}");
    let file = directory.path().join("file");
    std::fs::write(&file, "thesis").unwrap();
    let no_directory = refusal_of(&file);
    assert!(matches!(no_directory, RemoteError::Foreign(_)), "{no_directory}");
    let foreign = refusal_of(directory.path());
    assert!(matches!(foreign, RemoteError::Foreign(_)), "{foreign}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "left alone");
}

#[test]
fn a_directory_that_appears_later_is_used_then() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("share");
    let remote = Remote::open(&RemoteSpec::Directory(path.clone()), Options::default()).unwrap();
    assert!(matches!(remote.wait_for_answer(PATIENCE), State::Down { .. }));
    std::fs::create_dir(&path).unwrap();
    crate::common::eventually("the remote is up", || {
        matches!(remote.state(), State::Up { .. }).then_some(())
    });
    put(&remote, b"page");
}

#[test]
fn rights_follow_the_root() {
    let place = Place::directory();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    for (root, directory, file) in
        [(0o700, 0o700, 0o600), (0o2770, 0o2770, 0o660), (0o777, 0o777, 0o666)]
    {
        std::fs::set_permissions(&place.files, PermissionsExt::from_mode(root)).unwrap();
        let store = Directory::open(&place.files).unwrap();
        let path = place.file(put(&store, &bytes(u64::from(root), 10)));
        assert_eq!(mode(&path), file, "file below {root:o}");
        assert_eq!(mode(path.parent().unwrap()), directory, "directory below {root:o}");
    }
}

#[test]
fn planted_links_and_pipes_lead_nowhere() {
    let place = Place::directory();
    let store = place.store.as_ref();
    let outside = tempfile::tempdir().unwrap();
    let [linked, piped, shard] = [b"linked", b"piped!", b"shard!"].map(|content| named(content));
    for name in [linked, piped] {
        std::fs::create_dir_all(place.file(name).parent().unwrap()).unwrap();
    }
    std::os::unix::fs::symlink("/etc/passwd", place.file(linked)).unwrap();
    nix::unistd::mkfifo(&place.file(piped), nix::sys::stat::Mode::S_IRWXU).unwrap();
    std::os::unix::fs::symlink(outside.path(), place.file(shard).parent().unwrap()).unwrap();
    for name in [linked, piped, shard] {
        assert!(get(store, name, WHOLE).is_err());
        assert!(store.put(name, Source::of(b"x".to_vec()), PutMode::IfAbsent).is_err());
    }
    assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 0);
}

#[test]
fn what_others_put_between_the_directories_is_left_out() {
    let place = Place::directory();
    let name = put(place.store.as_ref(), b"object");
    let manifests = place.files.join("names");
    let [id, number] = [StoreId(7).to_string(), Sequence(9).to_string()];
    std::fs::create_dir_all(manifests.join(&id)).unwrap();
    for stray in ["names/deadbeef", "blobs/abc", "names/.DS_Store"] {
        std::fs::write(place.files.join(stray), b"stray").unwrap();
    }
    let list = |prefix| place.store.list(prefix, None);
    // Nor is a directory an object.
    std::fs::create_dir_all(place.file(named(b"in the way"))).unwrap();
    let listed = list(RemotePrefix::Blobs).unwrap().objects;
    assert_eq!(listed.iter().map(|it| it.name).collect::<Vec<_>>(), [name]);
    assert!(list(RemotePrefix::Manifests).unwrap().objects.is_empty());
    // What stands in the place of a directory or a manifest may hide one: nobody may take that for none.
    let refused = |place: &str| {
        let error = list(RemotePrefix::Manifests).unwrap_err().to_string();
        assert!(error.contains(place), "{error}");
    };
    let in_the_way = manifests.join(&id).join(&number);
    std::fs::create_dir(&in_the_way).unwrap();
    refused(&format!("names/{id}: {number}: not a file"));
    std::fs::remove_dir(&in_the_way).unwrap();
    std::fs::remove_dir(manifests.join(&id)).unwrap();
    std::fs::write(manifests.join(&id), b"stray").unwrap();
    refused(&format!("names/{id}: Not a directory"));
}

#[test]
fn what_cut_off_puts_left_is_swept_when_it_is_old() {
    let place = Place::directory();
    let name = put(place.store.as_ref(), b"object");
    let leftover = place.file(name).with_file_name(".tmp-0123");
    std::fs::write(&leftover, b"half").unwrap();
    let (past, future) = (Duration::from_secs(60), Duration::from_secs(60));
    assert_eq!(place.store.sweep(SystemTime::now() - past).unwrap(), 0);
    assert_eq!(place.store.sweep(SystemTime::now() + future).unwrap(), 1);
    assert!(!leftover.exists() && place.file(name).exists());
}

/// A filesystem of its own in memory, unmounted when dropped.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn new(options: &str) -> Tmpfs {
        let directory = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "kvfs-test"]).arg(directory.path());
        assert!(mount.status().unwrap().success());
        Tmpfs(directory)
    }
}

impl Tmpfs {
    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.path()).status();
    }
}

#[test]
fn a_full_remote_says_so_keeps_what_it_has_and_leaves_no_remains() {
    crate::require!(root);
    let tmpfs = Tmpfs::new("size=4m");
    let store = Directory::open(tmpfs.path()).unwrap();
    attach(&store, None).unwrap();
    let kept = put(&store, &bytes(1, 1 << 20));
    let large = bytes(2, 8 << 20);
    let outcome = store.put(named(&large), Source::of(large), PutMode::IfAbsent);
    assert!(matches!(outcome, Err(RemoteError::Full(_))), "{outcome:?}");
    assert_eq!(get(&store, kept, WHOLE).unwrap(), bytes(1, 1 << 20));
    put(&store, &bytes(3, 1 << 20));
}

#[test]
fn a_read_only_remote_serves_and_refuses() {
    crate::require!(root);
    let tmpfs = Tmpfs::new("size=4m");
    let store = Directory::open(tmpfs.path()).unwrap();
    attach(&store, None).unwrap();
    let name = put(&store, b"page");
    let mut remount = Command::new("mount");
    assert!(remount.args(["-o", "remount,ro"]).arg(tmpfs.path()).status().unwrap().success());
    assert_eq!(get(&store, name, WHOLE).unwrap(), b"page");
    let outcome = store.put(named(b"x"), Source::of(b"x".to_vec()), PutMode::IfAbsent);
    assert!(matches!(outcome, Err(RemoteError::Denied(_))), "{outcome:?}");
    assert!(matches!(store.delete(name), Err(RemoteError::Denied(_))));
    assert!(matches!(store.refresh(name), Err(RemoteError::Denied(_))));
    drop(store);
}

#[test]
fn bytes_of_a_file_travel_without_passing_through_memory_whole() {
    let place = Place::directory();
    let content = bytes(4, 3 << 20);
    let mut file = tempfile::tempfile().unwrap();
    std::io::Write::write_all(&mut file, &content).unwrap();
    let name = named(&content);
    let source = Source::new(Arc::new(file), content.len() as u64);
    place.store.put(name, source, PutMode::IfAbsent).unwrap();
    let target = Arc::new(tempfile::tempfile().unwrap());
    place.store.get(name, WHOLE, target.clone()).unwrap();
    let mut found = vec![0; content.len()];
    std::os::unix::fs::FileExt::read_exact_at(target.as_ref(), &mut found, 0).unwrap();
    assert!(found == content);
}
