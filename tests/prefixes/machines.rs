//! Machines that share a remote find each other's pages by their prefixes.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use kvfs::reader::longest_prefix;
use kvfs::tier::remote::hold::Grace;
use kvfs::tier::remote::names::{self, Publisher, Row};
use kvfs::tier::remote::{self, BlobStore, Remote, RemoteSpec, StoreId};

use crate::by_hash::{chain, directory};
use crate::common::mount::{files_below, scratch_directory};
use crate::common::s3_server::{SECRET, SETTLED_WITHIN, Server};
use crate::common::sys::{assert_errno, getxattr, open};
use crate::common::{Mode, Model, Mount, eventually, forks, within};
use crate::writer::Sequence;

in_both_modes!(
    a_page_of_another_machine_is_found_by_its_hash,
    a_prompt_finds_the_sequence_of_another_machine_to_the_token,
    pages_that_are_gone_or_damaged_count_as_absent,
    an_edited_sequence_goes_on_only_as_far_as_its_tokens_say,
    a_conversation_whose_end_was_made_anew_is_found_as_well,
    an_index_that_lies_is_believed_by_nobody,
    side_rows_come_with_their_page,
    other_salts_find_nothing,
    what_is_closed_to_others_stays_where_it_is,
    machines_that_share_a_key_find_each_other_in_a_sealed_remote,
);

/// Machines, and the directory that they share.
struct Machines {
    remote: PathBuf,
    directory: tempfile::TempDir,
}

/// Whoever shares a remote hears of what others publish there after a tenth of a second.
fn options(remote: &str) -> Vec<&str> {
    let often = ["--commit-interval", "0.05", "--remote-index", "0.1"];
    [&often[..], &["--remote", remote, "--rebuild-from", "none"]].concat()
}

/// A sequence of that many tokens, which another machine with the same model knows of.
fn known(first: &Mount, second: &Mount, tokens: u32) -> (Model, Sequence) {
    known_of(Model::small(), first, second, tokens)
}

fn known_of(model: Model, first: &Mount, second: &Mount, tokens: u32) -> (Model, Sequence) {
    model.install(first);
    model.install(second);
    let mut sequence = Sequence::new(&model, "chat");
    sequence.append(first, &model, &(0..tokens).collect::<Vec<_>>());
    wait_until_known(second, &model, &sequence);
    (model, sequence)
}

#[test]
fn an_object_store_tells_of_the_prefixes_of_other_machines() {
    crate::require!(fuse, root, s3);
    let mut server = Server::start();
    let options = options("s3://bucket/some/prefix");
    let mount = || {
        let environment = server.environment(SECRET);
        let mount = Mount::with_environment(Mode::Passthrough, &options, environment);
        // Machines that find an empty place at the same moment wait for each other.
        eventually("the remote", || (mount.status("remote_state") == "up").then_some(()));
        mount
    };
    let (first, second) = (mount(), mount());
    let (model, sequence) = known(&first, &second, 100);
    let hashes = chain(&model, &sequence.tokens);
    assert_eq!(sequences(&second, &model), 0);
    for (number, hash) in (0..).zip(&hashes) {
        let here = directory(&second, &model, *hash).join("001.safetensors");
        let there = sequence.page(&first, &model, 1, number);
        assert!(std::fs::read(here).unwrap() == std::fs::read(there).unwrap());
    }
    let mut prompt: Vec<u32> = (0..200).collect();
    prompt[40] = 9999;
    let (tokens, found) = matching(&second, &model, &prompt);
    let found = found.unwrap();
    assert_eq!(tokens, 40);
    assert_eq!(
        getxattr(found.join("000/0000032.safetensors"), "user.kvfs.tier").unwrap(),
        "remote"
    );
    // Without the server a page that was not fetched counts as absent, and one that was is there.
    server.stop();
    assert_errno(open(found.join("000/0000032.safetensors"), libc::O_RDONLY), libc::ENOENT);
    assert_eq!(std::fs::read(found.join("001/0000032.safetensors")).unwrap().len(), 8192);
    assert_eq!(matching(&second, &model, &prompt).0, 40);
}

fn side_rows_come_with_their_page(mode: Mode) {
    let machines = Machines::new();
    let (first, second) = (machines.mount(mode), machines.mount(mode));
    let (model, sequence) = known_of(Model::with_side_rows(300), &first, &second, 70);
    let prompt: Vec<u32> = (0..64).collect();
    let found = within(SETTLED_WITHIN, "the prompt to be found", || {
        let (tokens, found) = matching(&second, &model, &prompt);
        found.filter(|_| tokens == 64)
    });
    for layer in 0..2 {
        for (number, start) in [(0, 0), (1, 32)] {
            let there = std::fs::read(sequence.page(&first, &model, layer, number)).unwrap();
            let name = names_of_page(layer, start);
            assert!(std::fs::read(found.join(&name)).unwrap() == there, "{name}");
        }
    }
    // 2 KV heads x 16, K and V, in f16, and 300 bytes beside them.
    let length = std::fs::metadata(found.join(names_of_page(1, 32))).unwrap().len();
    assert_eq!(length, 4096 + (32 * (128 + 300_u64)).next_multiple_of(4096));
}

fn names_of_page(layer: u32, start: u64) -> String {
    use kvfs::page::{Layer, TokenStart, names};
    format!("{}/{}", names::format_layer(Layer(layer)), names::format_page(TokenStart(start)))
}

impl Machines {
    fn new() -> Machines {
        let directory = scratch_directory();
        let remote = directory.path().join("remote");
        std::fs::create_dir(&remote).unwrap();
        Machines { remote, directory }
    }

    fn mount(&self, mode: Mode) -> Mount {
        Mount::with_options(mode, &options(self.remote.to_str().unwrap()))
    }

    /// One machine with a sequence of that many tokens, all published, and one with the same model.
    fn two(&self, mode: Mode, tokens: u32) -> (Mount, Mount, Model, Sequence) {
        let (first, second) = (self.mount(mode), self.mount(mode));
        let (model, sequence) = known(&first, &second, tokens);
        (first, second, model, sequence)
    }

    /// Does something to the stored copy of a page.
    fn damage(&self, page: &[u8], act: impl Fn(&Path)) {
        let is_it = |path: &&PathBuf| std::fs::read(path).is_ok_and(|bytes| bytes == page);
        act(files_below(&self.remote.join("blobs"))
            .iter()
            .find(is_it)
            .expect("the page in the remote"));
    }
}

fn wait_until_known(mount: &Mount, model: &Model, sequence: &Sequence) {
    let last = *chain(model, &sequence.tokens).last().unwrap();
    within(SETTLED_WITHIN, "the other machine to know the prefix", || {
        directory(mount, model, last).exists().then_some(())
    });
}

fn sequences(mount: &Mount, model: &Model) -> usize {
    std::fs::read_dir(model.sequence(mount, "")).unwrap().count()
}

fn matching(mount: &Mount, model: &Model, prompt: &[u32]) -> (u64, Option<PathBuf>) {
    let found = longest_prefix(&model.directory(mount), prompt).unwrap();
    (found.tokens, found.sequence)
}

fn what_is_closed_to_others_stays_where_it_is(mode: Mode) {
    let machines = Machines::new();
    let (first, second, model, sequence) = machines.two(mode, 70);
    let chmod = |path: &std::path::Path, mode: u32| {
        std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    };
    // Not even that it is there is told, for whoever guesses what was said would know it then.
    let mut open_since = 100_000;
    let mut assert_stays = |closed: &Sequence, is_told: bool| {
        if is_told {
            wait_until_known(&second, &model, closed);
        } else {
            // What comes later is known by then.
            open_since += 1000;
            let mut later = Sequence::new(&model, &format!("open-{open_since}"));
            later.append(&first, &model, &(open_since..open_since + 70).collect::<Vec<_>>());
            wait_until_known(&second, &model, &later);
            for hash in chain(&model, &closed.tokens) {
                assert!(!directory(&second, &model, hash).exists(), "{}", closed.name);
            }
        }
        assert_eq!(matching(&second, &model, &closed.tokens), (0, None), "{}", closed.name);
        let page = directory(&second, &model, chain(&model, &closed.tokens)[0]);
        assert_errno(open(page.join("000.safetensors"), libc::O_RDONLY), libc::ENOENT);
    };
    for (number, name) in (1..).zip(["closed", "layer", "page"]) {
        let mut closed = Sequence::new(&model, name);
        let path = model.sequence(&first, name);
        std::fs::create_dir(&path).unwrap();
        if name == "closed" {
            chmod(&path, 0o700);
        }
        let tokens: Vec<u32> = (1000 * number..1000 * number + 70).collect();
        std::fs::create_dir(path.join("001")).unwrap();
        if name == "layer" {
            chmod(&path.join("001"), 0o700);
        }
        closed.append(&first, &model, &tokens);
        if name == "page" {
            chmod(&closed.page(&first, &model, 1, 1), 0o600);
        }
        // Tokens that everybody may read are no secret.
        assert_stays(&closed, name != "closed");
    }
    // It is no fault of the store.
    assert_eq!(matching(&second, &model, &sequence.tokens).0, 64);
    // A closed directory above closes everything in it: what was told is withdrawn.
    chmod(&model.directory(&first), 0o700);
    within(SETTLED_WITHIN, "the prefix to be forgotten", || {
        // Nobody has asked for this one there, so it was not taken over.
        let hashes = chain(&model, &(2000..2070).collect::<Vec<u32>>());
        (!directory(&second, &model, hashes[0]).exists()).then_some(())
    });
}

fn a_page_of_another_machine_is_found_by_its_hash(mode: Mode) {
    let machines = Machines::new();
    let (first, mut second, model, sequence) = machines.two(mode, 70);
    let hashes = chain(&model, &sequence.tokens);
    // Asking takes nothing over.
    assert!(directory(&second, &model, hashes[0]).is_dir());
    assert_eq!(sequences(&second, &model), 0);
    for (number, hash) in (0..).zip(&hashes) {
        for layer in 0..2 {
            let name = format!("{layer:03}.safetensors");
            let here = directory(&second, &model, *hash).join(name);
            let there = sequence.page(&first, &model, layer, number);
            assert!(std::fs::read(here).unwrap() == std::fs::read(there).unwrap());
        }
    }
    // By now it is a page of this machine, which goes on without the other one.
    let names = crate::by_hash::names(&model.sequence(&second, ""));
    let [name] = names.try_into().unwrap();
    let name: String = name;
    assert!(name.starts_with("chat@") && name.len() == 13, "{name}");
    let adopted = Sequence { name, ..sequence.clone() };
    let page = adopted.page(&second, &model, 1, 1);
    assert_errno(getxattr(&page, "user.kvfs.origin"), libc::ENODATA);
    assert_eq!(getxattr(&page, "user.kvfs.tier").unwrap(), "ssd");
    std::fs::remove_dir_all(model.sequence(&first, "chat")).unwrap();
    eventually("this machine to rely on the page", || {
        (second.status("remote_waiting_files") == "0").then_some(())
    });
    second.remount();
    assert!(directory(&second, &model, hashes[1]).join("001.safetensors").is_file());
    assert!(std::fs::read(page).unwrap().len() == 8192);
    assert_eq!(second.status("errors"), "0");
    assert_eq!(second.status("remote_waiting_files"), "0");
}

fn a_prompt_finds_the_sequence_of_another_machine_to_the_token(mode: Mode) {
    let machines = Machines::new();
    let (first, second, model, mut sequence) = machines.two(mode, 100);
    let mut prompt: Vec<u32> = (0..200).collect();
    prompt[40] = 9999;
    let (tokens, found) = matching(&second, &model, &prompt);
    assert_eq!(tokens, 40);
    let found = found.unwrap();
    assert_eq!(std::fs::read(found.join("tokens")).unwrap().len(), 64 * 4);
    let page = found.join("000/0000032.safetensors");
    assert_eq!(getxattr(&page, "user.kvfs.tier").unwrap(), "remote");
    let origin = getxattr(&page, "user.kvfs.origin").unwrap();
    assert_eq!(page.metadata().unwrap().len(), 8192);
    assert!(found.to_str().unwrap().ends_with(&format!("@{}", &origin[..8])));
    let theirs = sequence.page(&first, &model, 0, 1);
    assert!(std::fs::read(&page).unwrap() == std::fs::read(theirs).unwrap());
    // The same sequence here goes on where it ended.
    let prompt: Vec<u32> = (0..100).collect();
    assert_eq!(matching(&second, &model, &prompt), (96, Some(found.clone())));
    sequence.append(&first, &model, &(100..130).collect::<Vec<_>>());
    wait_until_known(&second, &model, &sequence);
    let prompt: Vec<u32> = (0..130).collect();
    assert_eq!(matching(&second, &model, &prompt), (128, Some(found.clone())));
    assert_eq!(sequences(&second, &model), 1);
    // What is here is as good: nothing more is taken over.
    let mut own = Sequence::new(&model, "own");
    own.append(&second, &model, &(0..150).collect::<Vec<_>>());
    let (tokens, found) = matching(&second, &model, &prompt);
    assert!(tokens == 130 && found.unwrap().ends_with("own"));
    assert_eq!(matching(&second, &model, &[7, 8]), (0, None));
    assert_eq!(second.status("errors"), "0");
}

fn pages_that_are_gone_or_damaged_count_as_absent(mode: Mode) {
    let machines = Machines::new();
    let (first, second, model, sequence) = machines.two(mode, 96);
    let page = |number| std::fs::read(sequence.page(&first, &model, 0, number)).unwrap();
    let prompt: Vec<u32> = (0..96).collect();
    let (tokens, found) = matching(&second, &model, &prompt);
    assert_eq!(tokens, 96);
    let found = found.unwrap();
    machines.damage(&page(1), |path| std::fs::remove_file(path).unwrap());
    machines.damage(&page(2), |path| {
        let mut bytes = std::fs::read(path).unwrap();
        bytes[5000] ^= 1;
        std::fs::write(path, bytes).unwrap();
    });
    for (name, errno) in [("0000032", libc::ENOENT), ("0000064", libc::ENOENT)] {
        let path = found.join(format!("000/{name}.safetensors"));
        assert_errno(open(&path, libc::O_RDONLY), errno);
        assert!(!path.exists());
    }
    assert!(std::fs::read(found.join("000/0000000.safetensors")).unwrap() == page(0));
    assert_eq!(matching(&second, &model, &prompt), (32, Some(found)));
    assert_eq!(second.status("errors"), "0");
    let mut second = second;
    assert!(second.unmount().success());
    let mut fsck = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let checked = forks::output(fsck.arg("fsck").arg(second.store()));
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
}

/// What an engine computed after tokens had been removed does not follow from the tokens before it alone.
fn an_edited_sequence_goes_on_only_as_far_as_its_tokens_say(mode: Mode) {
    let machines = Machines::new();
    let (first, second) = (machines.mount(mode), machines.mount(mode));
    let model = Model::small();
    model.install(&first);
    model.install(&second);
    let mut sequence = Sequence::new(&model, "chat");
    sequence.append(&first, &model, &(0..70).collect::<Vec<_>>());
    let edit = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
        command.arg("seq").arg(words[0]).arg(model.directory(&first)).args(&words[1..]);
        let ended = forks::output(&mut command);
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    };
    edit(&["rm", "chat", "8..24"]);
    sequence.append(&first, &model, &(500..600).collect::<Vec<_>>());
    let mut sync = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    sync.args(["sync", "--remote"]).arg(first.path());
    assert!(forks::output(&mut sync).status.success());
    let prompt = sequence.tokens.clone();
    assert_eq!((prompt.len(), matching(&first, &model, &prompt).0), (170, 8));
    let hashes = chain(&model, &prompt);
    within(SETTLED_WITHIN, "the other machine to know the prefix", || {
        directory(&second, &model, hashes[1]).exists().then_some(())
    });
    // Pages of 32 tokens, of which the first 70 came before.
    for _ in 0..5 {
        let (tokens, found) = matching(&second, &model, &prompt);
        assert_eq!(tokens, 64);
        assert_eq!(std::fs::read(found.unwrap().join("tokens")).unwrap().len(), 64 * 4);
        let is_there = |hash: &_| directory(&second, &model, *hash).exists();
        assert_eq!(hashes.iter().filter(|hash| is_there(hash)).count(), 2);
        std::thread::sleep(Duration::from_millis(200));
    }
    // The machine that edited it does not get it back from there.
    let mut sync = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    sync.args(["sync", "--remote"]).arg(second.path());
    assert!(forks::output(&mut sync).status.success());
    std::thread::sleep(Duration::from_millis(500));
    assert!(matching(&first, &model, &prompt).0 <= 64);
}

fn a_conversation_whose_end_was_made_anew_is_found_as_well(mode: Mode) {
    let machines = Machines::new();
    let (first, second, model, sequence) = machines.two(mode, 100);
    let (tokens, before) = matching(&second, &model, &sequence.tokens);
    assert_eq!(tokens, 96);
    // The same name has another conversation there.
    std::fs::remove_dir_all(model.sequence(&first, "chat")).unwrap();
    let mut other = Sequence::new(&model, "chat");
    let prompt: Vec<u32> = (0..40).chain(900..960).collect();
    other.append(&first, &model, &prompt);
    wait_until_known(&second, &model, &other);
    let (tokens, after) = matching(&second, &model, &prompt);
    assert_eq!(tokens, 96);
    let (before, after) = (before.unwrap(), after.unwrap());
    assert_eq!(after.to_str().unwrap(), format!("{}.2", before.to_str().unwrap()));
    let last = *chain(&model, &prompt).last().unwrap();
    let page = directory(&second, &model, last).join("000.safetensors");
    let there = other.page(&first, &model, 0, 2);
    assert!(std::fs::read(page).unwrap() == std::fs::read(there).unwrap());
    // What was taken over before is still what it was.
    assert_eq!(matching(&second, &model, &sequence.tokens), (96, Some(before)));
    assert_eq!(second.status("errors"), "0");
}

fn machines_that_share_a_key_find_each_other_in_a_sealed_remote(mode: Mode) {
    let machines = Machines::new();
    let key = machines.directory.path().join("key");
    let mut keygen = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    forks::succeed(keygen.args(["remote", "keygen"]).arg(&key));
    let key = ["--remote-key", key.to_str().unwrap()];
    let options = [options(machines.remote.to_str().unwrap()), key.to_vec()].concat();
    let (first, second) =
        (Mount::with_options(mode, &options), Mount::with_options(mode, &options));
    let (model, mut sequence) = known(&first, &second, 70);
    let bytes = |page: &Path| std::fs::read(page).unwrap();
    let there = bytes(&sequence.page(&first, &model, 1, 1));
    for file in files_below(&machines.remote) {
        // Older manifests of names go meanwhile.
        let Ok(stored) = std::fs::read(&file) else { continue };
        let holds = |secret: &[u8]| stored.windows(secret.len()).any(|window| window == secret);
        assert!(!holds(&there[4000..4032]) && !holds(b"chat"), "{}", file.display());
    }
    let hash = chain(&model, &sequence.tokens)[1];
    assert!(bytes(&directory(&second, &model, hash).join("001.safetensors")) == there);
    assert_eq!(matching(&second, &model, &sequence.tokens).0, 70 / 32 * 32);

    // Whoever keeps the remote goes back to older manifests, which are genuine.
    sequence.append(&first, &model, &(70..130).collect::<Vec<_>>());
    wait_until_known(&second, &model, &sequence);
    drop(first);
    for store in std::fs::read_dir(machines.remote.join("names")).unwrap() {
        let mut manifests = files_below(&store.unwrap().path());
        manifests.sort();
        manifests.iter().skip(1).for_each(|newer| std::fs::remove_file(newer).unwrap());
    }
    eventually("the loss to be noticed", || {
        let errors = std::fs::read_to_string(second.path().join(".kvfs/errors")).unwrap();
        errors.contains("now there are only older ones").then_some(())
    });
}

fn an_index_that_lies_is_believed_by_nobody(mode: Mode) {
    let machines = Machines::new();
    let (_first, second, model, sequence) = machines.two(mode, 64);
    let lie = chain(&model, &(500..532).collect::<Vec<_>>())[0];
    let truth = *chain(&model, &sequence.tokens).first().unwrap();
    let spec = RemoteSpec::Directory(machines.remote.clone());
    let remote = Arc::new(Remote::open(&spec, remote::Options::default()).unwrap());
    remote.wait_for_answer(crate::common::PATIENCE);
    let remote = remote as Arc<dyn BlobStore>;
    let honest = names::stores(remote.as_ref()).unwrap();
    let honest = honest.into_iter().find_map(|id| {
        let names = names::read_latest(&remote, id).unwrap()?;
        let rows: Vec<Row> = names.rows().map(Result::unwrap).collect();
        let is_it = |row: &Row| row.key[0] == b'H' && row.key[9..41] == truth.0;
        rows.iter().any(is_it).then_some((names.layout(), rows))
    });
    let (layout, mut rows) = honest.unwrap();
    for row in rows.iter_mut().filter(|row| row.key[0] == b'H') {
        row.key[9..41].copy_from_slice(&lie.0);
    }
    rows.dedup_by(|one, other| one.key == other.key);
    rows.sort_by(|one, other| one.key.cmp(&other.key));
    let mut publisher = Publisher::new(Arc::clone(&remote), StoreId(7), Grace::default()).unwrap();
    publisher.publish(layout, rows.into_iter().map(Ok), None).unwrap();

    let place = directory(&second, &model, lie);
    eventually("the lie to be heard", || place.exists().then_some(()));
    assert_errno(open(place.join("000.safetensors"), libc::O_RDONLY), libc::ENOENT);
    assert!(!place.exists(), "it is not believed again");
    assert_eq!(matching(&second, &model, &(500..532).collect::<Vec<_>>()), (0, None));
    assert_eq!(sequences(&second, &model), 0);
    assert_eq!(second.status("errors"), "0");
}

fn other_salts_find_nothing(mode: Mode) {
    let machines = Machines::new();
    let (_first, second, model, sequence) = machines.two(mode, 64);
    let salted = Model::with(|fields| fields.salt = Some("pepper".to_owned())).named("salted");
    salted.install(&second);
    let hash = chain(&model, &sequence.tokens)[1];
    assert!(directory(&second, &model, hash).exists());
    for hash in [hash, chain(&salted, &sequence.tokens)[1]] {
        assert!(!directory(&second, &salted, hash).exists());
    }
    assert_eq!(matching(&second, &salted, &sequence.tokens), (0, None));
    assert_eq!(matching(&second, &model, &sequence.tokens).0, 64);
}
