//! What finds pages by their content does not go round what keeps users and tenants apart.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use kvfs::page::{Metadata, PrefixHash, pack_rows};
use kvfs::reader::longest_prefix;

use crate::common::forks::{output, shell_as, succeed};
use crate::common::sys::write_and_close;
use crate::common::{Mode, Model, Mount};
use crate::writer::{Sequence, bytes};

const NOBODY: u32 = 65534;
const DAEMON: u32 = 1;

macro_rules! as_root {
    ($($scenario:ident),+ $(,)?) => {
        $(mod $scenario {
            #[test]
            fn passthrough() {
                $crate::require!(fuse, root, setpriv);
                super::$scenario($crate::common::Mode::Passthrough);
            }
            #[test]
            fn served() {
                $crate::require!(fuse, root, setpriv);
                super::$scenario($crate::common::Mode::Served);
            }
        })+
    };
}

as_root!(
    a_private_sequence_is_found_by_nobody,
    a_slot_is_as_private_as_its_pages,
    counters_are_for_who_mounted,
    tenants_share_nothing,
);

#[track_caller]
fn assert_denied(mount: &Mount, user: u32, script: &str) {
    let ended = output(&mut shell_as(mount.path(), user, script));
    let text = String::from_utf8_lossy(&ended.stderr).into_owned();
    let is_denied = text.contains("Permission denied") || text.contains("not permitted");
    assert!(!ended.status.success() && is_denied, "{script}: {}: {text}", ended.status);
}

fn chmod(path: &Path, mode: u32) {
    std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// A sequence of another user in a model that everybody may read.
fn with_sequence(mode: Mode) -> (Mount, Model, Sequence) {
    let (mount, model) = (Mount::new(mode), Model::small());
    model.install(&mount);
    let mut sequence = Sequence::new(&model, "chat");
    sequence.append(&mount, &model, &(0..70).collect::<Vec<_>>());
    let path = model.sequence(&mount, "chat");
    succeed(Command::new("chown").arg("-R").arg(format!("{DAEMON}:{DAEMON}")).arg(path));
    (mount, model, sequence)
}

fn a_private_sequence_is_found_by_nobody(mode: Mode) {
    let (mount, model, sequence) = with_sequence(mode);
    let directory = model.sequence(&mount, "chat");
    let first_page = &bytes(&sequence.tokens)[..model.page_tokens() as usize * 4];
    let hash = PrefixHash::next(None, first_page).to_string();
    let by_hash = model.directory(&mount).join("prefixes").join(&hash[..2]).join(&hash);
    let found = || {
        let found = longest_prefix(&model.directory(&mount), &sequence.tokens).unwrap();
        (found.tokens, by_hash.exists())
    };
    assert_eq!(found(), (70, true));
    for private in [0o700, 0o710, 0o701] {
        chmod(&directory, private);
        assert_eq!(found(), (0, false), "{private:o}");
    }
    chmod(&directory, 0o755);
    chmod(&directory.join("tokens"), 0o600);
    assert_eq!(found(), (0, false));
    chmod(&directory.join("tokens"), 0o644);
    assert_eq!(found(), (70, true));
    // Who lets nobody into the model's directory has nobody to hide from.
    chmod(&directory, 0o700);
    succeed(Command::new("chown").arg(DAEMON.to_string()).arg(model.directory(&mount)));
    succeed(Command::new("chgrp").arg(DAEMON.to_string()).arg(model.directory(&mount)));
    chmod(&model.directory(&mount), 0o700);
    assert_eq!(found(), (70, true));
}

fn a_slot_is_as_private_as_its_pages(mode: Mode) {
    let (mount, model, _) = with_sequence(mode);
    let directory = model.sequence(&mount, "chat");
    let read = "cat models/small/slots/chat.bin > /dev/null";
    for user in [NOBODY, DAEMON] {
        succeed(&mut shell_as(mount.path(), user, read));
    }
    for (below, mode) in [("", 0o700), ("tokens", 0o600), ("000", 0o700)] {
        let path = directory.join(below);
        let before = std::fs::metadata(&path).unwrap().mode() & 0o7777;
        chmod(&path, mode);
        assert_denied(&mount, NOBODY, read);
        succeed(&mut shell_as(mount.path(), DAEMON, read));
        chmod(&path, before);
    }
    let shown = std::fs::metadata(model.directory(&mount).join("slots/chat.bin")).unwrap();
    assert_eq!((shown.uid(), shown.gid()), (DAEMON, DAEMON));
    // One page that others may not read keeps them from all of it.
    chmod(&model.page_path(&mount, "chat", 1, 32), 0o600);
    assert_denied(&mount, NOBODY, read);
}

fn counters_are_for_who_mounted(mode: Mode) {
    let (mount, model, _) = with_sequence(mode);
    for view in ["status", "metrics", "config", "errors"] {
        assert_denied(&mount, NOBODY, &format!("cat .kvfs/{view}"));
        assert!(std::fs::read(mount.join(".kvfs").join(view)).is_ok());
    }
    // What is said about a file is said to who may read it.
    chmod(&model.page_path(&mount, "chat", 0, 0), 0o600);
    let page = "models/small/sequences/chat/000/0000000.safetensors";
    for name in ["tier", "checksum", "stored_bytes"] {
        let ask = format!("getfattr -n user.kvfs.{name} {page}");
        assert_denied(&mount, NOBODY, &ask);
        succeed(&mut shell_as(mount.path(), DAEMON, &ask));
    }
}

fn tenants_share_nothing(mode: Mode) {
    let mount = Mount::new(mode);
    let tenants = ["a", "b"].map(|tenant| {
        let model = Model::with(|fields| fields.tenant = Some(tenant.to_owned())).named(tenant);
        model.install(&mount);
        model
    });
    // Files with equal bytes: they do not say to which cache they belong.
    let write = |model: &Model, sequence| {
        let rows = model.rows(1, model.page_tokens());
        let geometry = model.manifest.geometry();
        let file = pack_rows(geometry, &rows, model.page_tokens(), &Metadata::new()).unwrap();
        let path = model.page_path(&mount, sequence, 0, 0);
        write_and_close(&path, &file).unwrap();
        std::fs::metadata(path).unwrap().ino()
    };
    let [first, second] = [&tenants[0], &tenants[1]].map(|model| write(model, "chat"));
    assert_ne!(first, second);
    // Within one tenant they are one.
    assert_eq!(write(&tenants[0], "other"), first);
    // The hashes of the prefixes differ, too.
    let [first, second] = tenants.each_ref().map(|model| model.manifest.prefix_root());
    assert_ne!(first, second);
}
