//! Each state that an object's copies can be in: everything that tells of it is asked, and compared with
//! the disk and the remote.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::common::mount::files_below;
use crate::common::sys::{getxattr, setxattr, sync_directory, write_and_close};
use crate::common::{Mode, Model, Mount, eventually};
use crate::place::{Place, kvfs, printed};

in_both_modes!(
    every_state_of_a_page_is_told_as_it_is,
    what_is_uploaded_and_not_named_is_told_as_it_is,
    encoded_copies_are_told_as_they_are,
    copies_on_one_machine_are_told_as_they_are,
);

/// Where copies of a page are, whoever tells it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is an answer of its own")]
struct Copies {
    /// The word of the attribute and of the plan.
    tier: &'static str,
    /// It is read from an encoded copy.
    is_encoded: bool,
    /// Files of the store: raw, and encoded.
    raw: bool,
    encoded: bool,
    /// The remote has it.
    remote: bool,
    /// An open would find its bytes.
    can_be_read: bool,
}

/// A page of 1 MiB and 4 KiB, of which zstd leaves little.
fn model() -> Model {
    Model::with(|fields| {
        fields.page_tokens = 1024;
        fields.head_dim = 128;
        fields.num_layers = 1;
    })
}

fn page(model: &Model) -> Vec<u8> {
    let mut rows = model.rows(1, 1024);
    for byte in &mut rows {
        *byte &= 0x01;
    }
    kvfs::page::pack_page(&model.place(0, 0), &rows, 1024).unwrap()
}

fn write_page(mount: &Mount, model: &Model) -> PathBuf {
    let path = model.page_path(mount, "a", 0, 0);
    let ids: Vec<u8> = (0..1024_u32).flat_map(u32::to_le_bytes).collect();
    std::fs::write(model.tokens_path(mount, "a"), ids).unwrap();
    let staged = path.with_file_name("p.tmp");
    write_and_close(&staged, &page(model)).unwrap();
    crate::common::sys::rename(&staged, &path).unwrap();
    path
}

/// Files of the store that hold the page: raw, and encoded.
fn stored(mount: &Mount, model: &Model) -> (bool, bool) {
    let bytes = page(model);
    let objects = mount.objects();
    let is_raw = |path: &PathBuf| std::fs::read(path).is_ok_and(|found| found == bytes);
    (objects.iter().any(is_raw), objects.iter().any(|path| path.extension().is_some()))
}

/// Asks everything about the only page of a mount, and looks at the disk and the remote.
#[track_caller]
fn check(state: &str, (mount, model): (&Mount, &Model), remote: Option<&Path>, is: &Copies) {
    let path = model.page_path(mount, "a", 0, 0);
    let (raw, encoded) = stored(mount, model);
    assert_eq!((raw, encoded), (is.raw, is.encoded), "{state}: the disk");
    let blobs = remote.map_or(0, |remote| {
        let files = files_below(remote);
        files.iter().filter(|path| path.starts_with(remote.join("blobs"))).count()
    });
    assert!(!is.remote || blobs > 0, "{state}: the remote");
    let attribute = |name: &str| getxattr(&path, &format!("user.kvfs.{name}")).unwrap();
    assert_eq!(attribute("tier"), is.tier, "{state}: user.kvfs.tier");
    let is_near = !is.is_encoded && is.tier != "remote";
    assert_eq!(attribute("encoding") == "raw", is_near, "{state}: user.kvfs.encoding");
    let plan = printed(&kvfs(&["status", "--json", "--plan"], &[&path]));
    let plan: Value = serde_json::from_str(&plan).unwrap();
    assert_eq!(plan["files"][0]["tier"], is.tier, "{state}: the plan");
    assert_eq!(plan["unreadable"]["files"], u64::from(!is.can_be_read), "{state}: the plan");
    let without = u64::from(is.tier == "remote");
    assert_eq!(plan["without_remote"]["unreadable_files"], without, "{state}: the plan");
    let prompt: Vec<u32> = (0..1024).collect();
    let promised = kvfs::reader::longest_prefix(&model.directory(mount), &prompt).unwrap().tokens;
    assert_eq!(promised, if is.can_be_read { 1024 } else { 0 }, "{state}: match");
    let said = kvfs(&["inspect"], &[&path]);
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    if is.can_be_read {
        assert!(said.contains(&format!("user.kvfs.tier: {}", is.tier)), "{state}: {said}");
    }
    let is_ok = mount.status("state") == "ok";
    // What is held, and not named, is so because the names cannot be put.
    let may_be_degraded = !is.can_be_read || state.starts_with("held");
    assert!(is_ok || may_be_degraded, "{state}: {}", mount.status("state"));
    assert_eq!(mount.metric("kvfs_degraded"), u64::from(!is_ok), "{state}: metrics");
    // Asking moved nothing.
    assert_eq!((attribute("tier"), stored(mount, model)), (is.tier.to_owned(), (raw, encoded)));
}

fn ask(path: &Path, tier: &str) {
    eventually("the page to be at rest", || setxattr(path, "user.kvfs.tier", tier.as_bytes()).ok());
}

fn every_state_of_a_page_is_told_as_it_is(mode: Mode) {
    let mut place = Place::new(mode, &["--cold", "zstd:1"]);
    let model = model();
    model.install(&place.mount);
    let remote = place.remote.clone();
    let remote = Some(remote.as_path());
    let path = write_page(&place.mount, &model);
    let named =
        Copies { tier: "ssd", raw: true, remote: true, can_be_read: true, ..Copies::default() };
    place.wait_until_uploaded();
    check("named", (&place.mount, &model), remote, &named);
    let only = Copies { tier: "remote", remote: true, can_be_read: true, ..Copies::default() };
    printed(&kvfs(&["evict"], &[&path]));
    eventually("its file to be gone", || (!stored(&place.mount, &model).0).then_some(()));
    check("only", (&place.mount, &model), remote, &only);
    printed(&kvfs(&["promote"], &[&path]));
    check("fetched", (&place.mount, &model), remote, &named);
    printed(&kvfs(&["evict"], &[&path]));

    // The same store without its remote.
    assert!(place.mount.unmount().success());
    let help = printed(&kvfs(&["mount", "--help"], &[]));
    let offline: &[&str] = if help.contains("--offline") { &["--offline"] } else { &[] };
    let mount = Mount::of_store_with(mode, offline, place.mount.store());
    let out_of_reach = Copies { can_be_read: false, ..only };
    check("only, without the remote", (&mount, &model), remote, &out_of_reach);
    drop(mount);
    place.mount.mount();
    let only = Copies { can_be_read: true, ..out_of_reach };
    check("only, with the remote again", (&place.mount, &model), remote, &only);
}

fn what_is_uploaded_and_not_named_is_told_as_it_is(mode: Mode) {
    let mut place = Place::new(mode, &["--cold", "zstd:1"]);
    let model = model();
    model.install(&place.mount);
    place.wait_until_uploaded();
    let before = place.mount.status_number("remote_objects");
    // Something lies where the manifests of names go.
    let names = place.remote.join("names");
    let aside = place.remote.with_file_name("aside");
    #[allow(clippy::disallowed_methods, reason = "not in a store")]
    std::fs::rename(&names, &aside).unwrap();
    std::fs::write(&names, b"").unwrap();
    let path = write_page(&place.mount, &model);
    ask(&path, "remote");
    let wait_until_held = |mount: &Mount| {
        eventually("the page to be verified", || {
            let moving = getxattr(&path, "user.kvfs.moving").ok()?;
            // Once a manifest could not be written.
            let waits = moving == "naming" || moving == "not_uploaded";
            (waits && mount.status_number("remote_objects") == before + 1).then_some(())
        });
        assert_eq!(mount.status("remote_waiting_files"), "1");
    };
    let held =
        Copies { tier: "ssd", raw: true, remote: true, can_be_read: true, ..Copies::default() };
    wait_until_held(&place.mount);
    let remote = place.remote.clone();
    check("held", (&place.mount, &model), Some(&remote), &held);
    // Not believed after a crash, which the wish does not outlive either.
    place.mount.crash();
    check("held, after a crash", (&place.mount, &model), Some(&remote), &held);
    assert_eq!(place.mount.status("remote_waiting_files"), "1");
    ask(&path, "remote");
    wait_until_held(&place.mount);
    std::fs::remove_file(&names).unwrap();
    #[allow(clippy::disallowed_methods, reason = "not in a store")]
    std::fs::rename(&aside, &names).unwrap();
    eventually("its file to be gone", || (!stored(&place.mount, &model).0).then_some(()));
    let only = Copies { tier: "remote", raw: false, ..held };
    check("named, and gone", (&place.mount, &model), Some(&remote), &only);
}

fn encoded_copies_are_told_as_they_are(mode: Mode) {
    let options = ["--cold", "zstd:1", "--ssd", "16M", "--commit-interval", "0.05"];
    let mount = Mount::with_options(mode, &options);
    let model = model();
    model.install(&mount);
    let path = write_page(&mount, &model);
    sync_directory(mount.path()).unwrap();
    let raw = Copies { tier: "ssd", raw: true, can_be_read: true, ..Copies::default() };
    check("raw", (&mount, &model), None, &raw);
    // What cannot be encoded takes the room.
    let ballast: Vec<PathBuf> = (0..4_u64).map(|n| mount.files(n.to_string())).collect();
    for (number, path) in (0..).zip(&ballast) {
        write_and_close(path, &crate::common::fill(number, 4 << 20)).unwrap();
    }
    eventually("the raw file to be gone", || {
        (stored(&mount, &model) == (false, true)).then_some(())
    });
    let only = Copies { is_encoded: true, raw: false, encoded: true, ..raw };
    check("only encoded", (&mount, &model), None, &only);
    for path in ballast {
        std::fs::remove_file(path).unwrap();
    }
    eventually("the room", || (mount.status_number("ssd_used_bytes") < 1 << 20).then_some(()));
    printed(&kvfs(&["promote"], &[&path]));
    let both = Copies { encoded: true, ..raw };
    check("raw and encoded", (&mount, &model), None, &both);
    assert!(std::fs::read(&path).unwrap() == page(&model));
    // What is changed has no encoded copy any more: its name leads to another object.
    std::fs::remove_file(&path).unwrap();
    sync_directory(mount.path()).unwrap();
    eventually("both to be gone", || (stored(&mount, &model) == (false, false)).then_some(()));
}

fn copies_on_one_machine_are_told_as_they_are(mode: Mode) {
    let options = ["--ram", "12M", "--commit-interval", "3600"];
    let mut mount = Mount::with_options(mode, &options);
    let model = model();
    model.install(&mount);
    let path = write_page(&mount, &model);
    let dirty = Copies { tier: "ram", can_be_read: true, ..Copies::default() };
    check("in memory, dirty", (&mount, &model), None, &dirty);
    sync_directory(mount.path()).unwrap();
    let clean = Copies { raw: true, ..dirty };
    check("in memory, clean", (&mount, &model), None, &clean);
    ask(&path, "ssd");
    let on_disk = Copies { tier: "ssd", ..clean };
    check("only this machine", (&mount, &model), None, &on_disk);

    // Damaged, which is known once somebody has looked.
    assert!(mount.unmount().success());
    let object = mount
        .objects()
        .into_iter()
        .find(|path| std::fs::read(path).is_ok_and(|found| found == page(&model)));
    let object = object.unwrap();
    let mut bytes = page(&model);
    bytes[9000] ^= 1;
    std::fs::write(&object, &bytes).unwrap();
    mount.mount();
    assert_eq!(kvfs(&["scrub"], &[mount.path()]).status.code(), Some(3));
    let damaged = "damaged";
    let tier = getxattr(&path, "user.kvfs.tier").unwrap();
    assert_eq!(
        (tier.as_str(), getxattr(&path, "user.kvfs.damaged").unwrap().as_str()),
        ("ssd", "yes")
    );
    assert_eq!(mount.status("state"), "degraded", "{damaged}");

    // Gone.
    std::fs::remove_file(&object).unwrap();
    let gone = Copies { tier: "none", ..Copies::default() };
    check("gone", (&mount, &model), None, &gone);
    let said = kvfs(&["promote"], &[&path]);
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.contains("no copy of it is left"), "{said}");
}
