//! What is asked of directories, sequences and prefixes over a mount, and what hints change.

use std::path::{Path, PathBuf};
use std::process::Command;

use kvfs::page::{Dtype, ManifestFields, PrefixHash};

use crate::common::forks::{output, shell_as, succeed};
use crate::common::sys::{
    assert_errno, getxattr, rename, setxattr, sync_directory, write_and_close,
};
use crate::common::{Mode, Model, Mount, eventually};

in_both_modes!(
    what_is_finished_leaves_memory_first_until_it_is_opened,
    a_hint_ends_with_a_second_name_and_with_the_mount,
    a_directory_moves_and_is_pinned_as_a_whole,
);
as_root!((fuse, root, setpriv) nobody_speaks_for_another);

const HINT: &str = "user.kvfs.hint";
const PIN: &str = "user.kvfs.pin";
const ALICE: u32 = 1001;
const BOB: u32 = 1002;
/// A page file is 256 KiB + 4 KiB.
const PAGE_TOKENS: u64 = 128;

fn model(mount: &Mount) -> Model {
    let model = Model::with(|fields| {
        *fields = ManifestFields::new("test/one", Dtype::F16, 1, 8, 64);
        fields.page_tokens = 128;
    });
    model.install(mount);
    model
}

/// Pages of a sequence, each with bytes that no other has.
fn publish(
    mount: &Mount, model: &Model, (sequence, seed): (&str, u64), count: u64,
) -> Vec<PathBuf> {
    let publish = |number| {
        let path = model.page_path(mount, sequence, 0, number * PAGE_TOKENS);
        let temporary = path.with_extension("tmp");
        let page = model.page(0, number * PAGE_TOKENS, seed * 1000 + number);
        write_and_close(&temporary, &page).unwrap();
        rename(&temporary, &path).unwrap();
        path
    };
    (0..count).map(publish).collect()
}

fn hint(word: &str, path: &Path) {
    let program = env!("CARGO_BIN_EXE_kvfs");
    succeed(Command::new(program).arg("hint").arg(path).arg(word));
    eventually("the hint to be given everywhere", || {
        getxattr(path, "user.kvfs.moving").is_err().then_some(())
    });
}

fn is_finished(path: &Path) -> bool {
    getxattr(path, HINT).is_ok_and(|hint| hint == "finished")
}

fn tiers(paths: &[PathBuf]) -> Vec<String> {
    paths.iter().map(|path| getxattr(path, "user.kvfs.tier").unwrap()).collect()
}

fn what_is_finished_leaves_memory_first_until_it_is_opened(mode: Mode) {
    let mount = Mount::with_options(mode, &["--ram", "8M", "--commit-interval", "0.1"]);
    let model = model(&mount);
    // Memory has room for some thirty pages.
    let kept = publish(&mount, &model, ("kept", 1), 8);
    let ended = publish(&mount, &model, ("ended", 2), 12);
    let again = publish(&mount, &model, ("again", 3), 4);
    sync_directory(mount.path()).unwrap();
    for sequence in ["ended", "again"] {
        hint("finished", &model.sequence(&mount, sequence));
    }
    assert!(ended.iter().chain(&again).all(|path| is_finished(path)));
    assert!(!is_finished(&kept[0]));
    for path in &again {
        std::fs::read(path).unwrap();
    }
    assert!(again.iter().all(|path| !is_finished(path)), "they were opened");
    assert!(tiers(&ended).iter().all(|tier| tier == "ram"));
    // Seven must leave at least, and a few more for what is made in advance.
    publish(&mount, &model, ("new", 4), 14);
    let gone = tiers(&ended).iter().filter(|tier| *tier == "ssd").count();
    assert!(gone >= 7, "{:?}", tiers(&ended));
    let others = [kept, again].concat();
    assert!(tiers(&others).iter().all(|tier| tier == "ram"), "{:?}", tiers(&others));
    // Nothing was deleted.
    assert!(ended.iter().all(|path| std::fs::read(path).is_ok()));
}

fn a_hint_ends_with_a_second_name_and_with_the_mount(mode: Mode) {
    let mut mount = Mount::with_options(mode, &["--ram", "8M", "--commit-interval", "0.1"]);
    let model = model(&mount);
    let pages = publish(&mount, &model, ("a", 1), 4);
    let forked = model.page_path(&mount, "b", 0, 0);
    std::fs::hard_link(&pages[0], &forked).unwrap();
    let sequence = model.sequence(&mount, "a");
    hint("finished", &sequence);
    assert_eq!(
        pages.iter().map(|path| is_finished(path)).collect::<Vec<_>>(),
        [false, true, true, true]
    );
    // A fork after the hint goes on with what it takes.
    std::fs::hard_link(&pages[1], model.page_path(&mount, "b", 0, PAGE_TOKENS)).unwrap();
    assert!(!is_finished(&pages[1]) && is_finished(&pages[2]));
    let moved = sequence.with_file_name("moved");
    rename(&sequence, &moved).unwrap();
    assert!(is_finished(&moved.join("000/0000256.safetensors")));
    hint("waiting", &moved);
    assert!(!is_finished(&moved.join("000/0000256.safetensors")));
    hint("finished", &moved);
    mount.remount();
    assert!(!is_finished(&moved.join("000/0000256.safetensors")));
    assert_errno(setxattr(&moved, HINT, b"done"), libc::EINVAL);
}

fn a_directory_moves_and_is_pinned_as_a_whole(mode: Mode) {
    let mount = Mount::with_options(mode, &["--ram", "8M", "--commit-interval", "0.1"]);
    let model = model(&mount);
    let pages = publish(&mount, &model, ("a", 1), 4);
    sync_directory(mount.path()).unwrap();
    let sequence = model.sequence(&mount, "a");
    let all_are = |tier: &str| tiers(&pages).iter().all(|found| found == tier).then_some(());
    setxattr(&sequence, "user.kvfs.tier", b"ssd").unwrap();
    eventually("all to leave memory", || all_are("ssd"));
    setxattr(&sequence, "user.kvfs.tier", b"ram").unwrap();
    eventually("all to come back", || all_are("ram"));
    setxattr(&sequence, PIN, b"1").unwrap();
    let is_pinned = |path: &PathBuf| getxattr(path, PIN).is_ok_and(|pin| pin == "1");
    eventually("all to be pinned", || pages.iter().all(is_pinned).then_some(()));
    assert_errno(getxattr(&sequence, PIN), libc::ENODATA);
}

fn nobody_speaks_for_another(mode: Mode) {
    let mount = Mount::with_options(mode, &["--ram", "64M", "--commit-interval", "0.1"]);
    let model = model(&mount);
    let tokens: Vec<u8> = (0..3 * 128_u32).flat_map(u32::to_le_bytes).collect();
    let mut all = Vec::new();
    for (name, user, seed) in [("alice", ALICE, 1), ("bob", BOB, 2)] {
        all.push(publish(&mount, &model, (name, seed), 3));
        let sequence = model.sequence(&mount, name);
        write_and_close(sequence.join("tokens"), &tokens).unwrap();
        succeed(Command::new("chown").arg("-R").arg(format!("{user}:{user}")).arg(&sequence));
    }
    let next = |parent, page: &[u8]| Some(PrefixHash::next(parent, page));
    let hash = tokens.chunks(512).take(2).fold(None, next).unwrap().to_string();
    let name = model.directory(&mount).file_name().unwrap().to_str().unwrap().to_owned();
    let prefix = format!("models/{name}/prefixes/{}/{hash}", &hash[..2]);
    let try_as = |user: u32, attribute: &str, value: &str, path: &str| {
        let script = format!("setfattr -n {attribute} -v {value} {path}");
        output(&mut shell_as(mount.path(), user, &script)).status.success()
    };
    let hers = format!("models/{name}/sequences/alice");
    for (attribute, value) in [(HINT, "finished"), (PIN, "1"), ("user.kvfs.tier", "ssd")] {
        assert!(!try_as(BOB, attribute, value, &hers), "{attribute}");
        assert!(!try_as(BOB, attribute, value, &format!("{hers}/000/0000000.safetensors")));
        assert!(!try_as(65534, attribute, value, &prefix), "{attribute}");
    }
    assert!(!try_as(ALICE, "user.kvfs.ttl", "100", &prefix));
    assert!(try_as(ALICE, HINT, "finished", &prefix));
    let ended = eventually("the hint to be given", || {
        is_finished(&all[0][1]).then(|| all.iter().flatten().map(|path| is_finished(path)))
    });
    // Two of her pages, none of his.
    assert_eq!(ended.collect::<Vec<_>>(), [true, true, false, false, false, false]);
    // Nothing else can be done in it because of that.
    for script in ["touch {}/new", "mkdir {}/new", "rm -f {}/000.safetensors", "chmod 700 {}"] {
        let script = script.replace("{}", &prefix);
        let ended = output(&mut shell_as(mount.path(), ALICE, &script));
        assert!(!ended.status.success(), "{script}");
    }
    assert!(all.iter().flatten().all(|path| path.exists()));
}
