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

as_root!(
    (fuse, root, setpriv)
    a_private_sequence_is_found_by_nobody,
    what_is_above_a_sequence_is_closed_to_its_owner_too,
    a_slot_is_as_private_as_its_pages,
    a_slot_takes_the_place_of_nobody_elses_sequence,
    a_block_tells_nothing_of_files_that_its_writer_cannot_read,
    a_block_is_there_for_who_may_read_its_file,
    a_sticky_bit_keeps_blocks_for_who_registered_them,
    one_user_does_not_lock_others_out,
    one_user_does_not_save_slots_for_ever,
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
    for closed in [directory.join("001"), directory.parent().unwrap().to_owned()] {
        chmod(&closed, 0o700);
        assert_eq!(found(), (0, false), "{}", closed.display());
        chmod(&closed, 0o755);
    }
    assert_eq!(found(), (70, true));
    // Who lets nobody into the model's directory has nobody to hide from.
    chmod(&directory, 0o700);
    succeed(Command::new("chown").arg(DAEMON.to_string()).arg(model.directory(&mount)));
    succeed(Command::new("chgrp").arg(DAEMON.to_string()).arg(model.directory(&mount)));
    chmod(&model.directory(&mount), 0o700);
    assert_eq!(found(), (70, true));
}

fn what_is_above_a_sequence_is_closed_to_its_owner_too(mode: Mode) {
    let (mount, model, sequence) = with_sequence(mode);
    let sequences = model.directory(&mount).join("sequences");
    let first_page = &bytes(&sequence.tokens)[..model.page_tokens() as usize * 4];
    let hash = PrefixHash::next(None, first_page).to_string();
    let by_hash = format!("test -e models/small/prefixes/{}/{hash}", &hash[..2]);
    let by_name = "cat models/small/slots/chat.bin > /dev/null";
    let is_found =
        |script: &str| output(&mut shell_as(mount.path(), DAEMON, script)).status.success();
    // Nobody else may ask.
    let owner = format!("{DAEMON}:{DAEMON}");
    succeed(Command::new("chown").arg(owner).arg(model.directory(&mount)));
    chmod(&model.directory(&mount), 0o700);
    assert!(is_found(&by_hash) && is_found(by_name));
    chmod(&sequences, 0o700);
    assert!(!is_found("cat models/small/sequences/chat/tokens"));
    assert!(!is_found(&by_hash));
    assert!(!is_found(by_name));
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
        // Its length tells how much was said.
        let seen = output(&mut shell_as(mount.path(), NOBODY, "stat models/small/slots/chat.bin"));
        let told = String::from_utf8_lossy(&seen.stderr).into_owned();
        assert!(told.contains("No such file"), "{told}");
        succeed(&mut shell_as(mount.path(), DAEMON, read));
        chmod(&path, before);
    }
    let shown = std::fs::metadata(model.directory(&mount).join("slots/chat.bin")).unwrap();
    assert_eq!((shown.uid(), shown.gid()), (DAEMON, DAEMON));
    // One page that others may not read keeps them from all of it.
    chmod(&model.page_path(&mount, "chat", 1, 32), 0o600);
    assert_denied(&mount, NOBODY, read);
}

fn a_slot_takes_the_place_of_nobody_elses_sequence(mode: Mode) {
    let (mount, model, _) = with_sequence(mode);
    let sequences = model.directory(&mount).join("sequences");
    // It has no tokens, so it is no slot that could be looked up.
    write_and_close(model.page_path(&mount, "alice", 0, 0), &model.page(0, 0, 9)).unwrap();
    let alice = model.sequence(&mount, "alice");
    succeed(Command::new("chown").arg("-R").arg(format!("{DAEMON}:{DAEMON}")).arg(&alice));
    chmod(&alice, 0o700);
    chmod(&model.directory(&mount), 0o1777);
    chmod(&sequences, 0o1777);
    let save =
        |name: &str| format!("cd models/small/slots && dd if=chat.bin of={name}.bin bs=64k 2>&1");
    let try_to_save = |name: &str| {
        let ended = output(&mut shell_as(mount.path(), NOBODY, &save(name)));
        (ended.status.success(), String::from_utf8_lossy(&ended.stdout).into_owned())
    };
    let (saved, said) = try_to_save("alice");
    assert!(!saved && said.contains("not permitted"), "{said}");
    let (saved, said) = try_to_save("mine");
    assert!(saved, "{said}");
    assert_eq!(std::fs::metadata(sequences.join("mine")).unwrap().uid(), NOBODY);
    // His own may be replaced, also where somebody has put something into it; then not.
    assert!(try_to_save("mine").0);
    // The kernel may know the name as the one that was replaced, for a moment.
    let kept = sequences.join("mine/kept");
    crate::common::eventually("a directory in it", || std::fs::create_dir(&kept).ok());
    write_and_close(sequences.join("mine/kept/file"), b"of root").unwrap();
    assert!(!try_to_save("mine").0);
    assert!(sequences.join("mine/kept/file").exists());
    // What is filled for it would take the place of what somebody else has there.
    let others = sequences.join("next~~");
    std::fs::create_dir(&others).unwrap();
    assert!(!try_to_save("next").0);
    assert!(others.exists());
    // No place for names of others is one for slots either.
    chmod(&sequences, 0o755);
    assert!(!try_to_save("other").0);
    assert_denied(&mount, NOBODY, "mkdir models/small/sequences/other");
    let owner = std::fs::metadata(&alice).unwrap().uid();
    assert_eq!((owner, alice.join("000/0000000.safetensors").exists()), (DAEMON, true));
}

fn a_block_tells_nothing_of_files_that_its_writer_cannot_read(mode: Mode) {
    let (mount, model, _) = with_sequence(mode);
    chmod(&model.directory(&mount), 0o1777);
    std::fs::create_dir(mount.files("closed")).unwrap();
    for (name, mode) in [("closed/pool", 0o644), ("private", 0o600), ("pool", 0o644)] {
        std::fs::write(mount.files(name), vec![0; 1 << 20]).unwrap();
        chmod(&mount.files(name), mode);
    }
    chmod(&mount.files("closed"), 0o700);
    let registers = |user: u32, file: &str| {
        let block = format!("models/small/blocks/{}.000", "ab".repeat(32));
        let shape = r#"\"layer\":0,\"shape\":[2,2,1],\"sizes\":[2048,2048],\"offsets\":[0,0,0,0]"#;
        let script = format!(
            "printf '%s' \"{{\\\"file\\\":\\\"{file}\\\",{shape}}}\" > {block}; test -e {block} && rm {block}"
        );
        output(&mut shell_as(mount.path(), user, &script)).status.success()
    };
    assert!(registers(NOBODY, "files/pool"), "{:?}", mount.errors());
    let refusals = |file: &str| {
        assert!(!registers(NOBODY, file), "{file}");
        let told = mount.errors().pop().unwrap();
        told.split(file).nth(1).unwrap().to_owned()
    };
    let absent = refusals("files/absent");
    assert_eq!(refusals("files/closed/pool"), absent);
    assert_eq!(refusals("files/closed/absent"), absent);
    assert_eq!(refusals("files/private"), absent);
    assert!(registers(0, "files/closed/pool"));
}

/// Registers a block in `files/pool`, as JSON for a shell.
fn register(user: u32, mount: &Mount) -> bool {
    let described = r#"{"file":"files/pool","layer":0,"shape":[2,2,1],"sizes":[2048,2048],"offsets":[0,0,0,0]}"#;
    let script = format!("printf '%s' '{described}' > {}", block());
    output(&mut shell_as(mount.path(), user, &script)).status.success()
}

fn block() -> String {
    format!("models/small/blocks/{}.000", "ab".repeat(32))
}

fn a_block_is_there_for_who_may_read_its_file(mode: Mode) {
    let (mount, _, _) = with_sequence(mode);
    let pool = mount.files("pool");
    std::fs::write(&pool, vec![0; 1 << 20]).unwrap();
    assert!(register(0, &mount), "{:?}", mount.errors());
    let is_there = |user| {
        let script = format!("cat {} > /dev/null", block());
        output(&mut shell_as(mount.path(), user, &script)).status.success()
    };
    assert!(is_there(NOBODY));
    chmod(&pool, 0o600);
    assert!(!is_there(NOBODY) && is_there(0));
    chmod(&pool, 0o644);
    chmod(&mount.files(""), 0o700);
    assert!(!is_there(NOBODY) && is_there(0));
}

fn a_sticky_bit_keeps_blocks_for_who_registered_them(mode: Mode) {
    let (mount, model, _) = with_sequence(mode);
    let pool = mount.files("pool");
    std::fs::write(&pool, vec![0; 1 << 20]).unwrap();
    chmod(&model.directory(&mount), 0o1777);
    assert!(register(DAEMON, &mount), "{:?}", mount.errors());
    let withdraw = format!("rm -f {}", block());
    assert!(!register(NOBODY, &mount));
    assert_denied(&mount, NOBODY, &withdraw);
    assert!(register(DAEMON, &mount));
    succeed(&mut shell_as(mount.path(), DAEMON, &withdraw));
    // Who was there first, when both have made one, keeps it.
    let late =
        format!("exec 3> {}; echo made; read line; printf '%s' \"$line\" >&3; exec 3>&-", block());
    let mut command = shell_as(mount.path(), NOBODY, &late);
    command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut child = crate::common::forks::spawn(&mut command).unwrap();
    let mut said = String::new();
    let mut answers = std::io::BufReader::new(child.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut answers, &mut said).unwrap();
    assert!(register(DAEMON, &mount));
    let described = r#"{"file":"files/pool","layer":0,"shape":[2,2,1],"sizes":[2048,2048],"offsets":[9,9,9,9]}"#;
    let mut told = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut told, format!("{described}\n").as_bytes()).unwrap();
    drop(told);
    child.wait().unwrap();
    let kept = std::fs::read_to_string(mount.join(block())).unwrap();
    assert!(kept.contains("[0,0,0,0]"), "{kept}");
    // Without the bit they are for all who may write there.
    chmod(&model.directory(&mount), 0o777);
    assert!(register(NOBODY, &mount));
    succeed(&mut shell_as(mount.path(), DAEMON, &withdraw));
}

fn one_user_does_not_save_slots_for_ever(mode: Mode) {
    crate::require!(python);
    let (mount, model, _) = with_sequence(mode);
    for directory in [model.directory(&mount), model.directory(&mount).join("sequences")] {
        chmod(&directory, 0o777);
    }
    let taker = r#"python3 -c "
import os
taken = 0
try:
    while taken < 100:
        os.open(f'models/small/slots/new-{taken}.bin', os.O_WRONLY | os.O_CREAT); taken += 1
except OSError as error:
    print(taken, error.errno, flush=True)
""#;
    let count = || succeed(&mut shell_as(mount.path(), NOBODY, taker)).trim().to_owned();
    let expected = format!("16 {}", libc::EAGAIN);
    assert_eq!(count(), expected);
    // They go with the one who had them.
    crate::common::eventually("all to be closed", || (count() == expected).then_some(()));
}

fn one_user_does_not_lock_others_out(mode: Mode) {
    crate::require!(python);
    let (mount, model, sequence) = with_sequence(mode);
    let taker = r#"python3 -c "
import os
taken = 0
try:
    while True:
        os.open('models/small/prefixes/match', os.O_RDWR); taken += 1
except OSError as error:
    print(taken, error.errno, flush=True)
input()""#;
    let mut command = shell_as(mount.path(), NOBODY, taker);
    command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut holder = crate::common::forks::spawn(&mut command).unwrap();
    let mut said = String::new();
    let mut answers = std::io::BufReader::new(holder.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut answers, &mut said).unwrap();
    assert_eq!(said.trim(), format!("16 {}", libc::EAGAIN));
    let found = longest_prefix(&model.directory(&mount), &sequence.tokens).unwrap();
    assert_eq!(found.tokens, 70);
    succeed(&mut shell_as(mount.path(), DAEMON, "cat models/small/slots/chat.bin > /dev/null"));
    drop(holder.stdin.take());
    holder.wait().unwrap();
}

fn counters_are_for_who_mounted(mode: Mode) {
    let (mount, model, _) = with_sequence(mode);
    for view in ["status", "metrics", "config", "errors", "events", "hottest", "page", "uses"] {
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
