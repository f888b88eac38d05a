//! `kvfs slots watch` keeps the conversations of an unmodified server.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde_json::json;

use crate::common::{Mode, Mount, eventually, forks};
use crate::engine::{Engine, STEP_TOKENS, create, prompt, write_model};
use crate::watch::{Watch, files, free_port, sequences};

in_both_modes!(conversations_are_kept_without_anyone_asking);

/// What the other conversation begins with.
const OTHER: &[u8] =
    b"Where was Ruth born, and when did she go to Bethlehem with her mother in law?";

/// A mount with a model, and a server's directory that is not in it.
struct Place {
    mount: Mount,
    path: PathBuf,
    slots: PathBuf,
    port: u16,
}

impl Place {
    fn new(mode: Mode) -> Place {
        let mount = Mount::new(mode);
        let (path, slots) = (mount.beside("tiny.gguf"), mount.beside("slots"));
        write_model(&path);
        std::fs::create_dir(&slots).unwrap();
        create(&mount.join("models/tiny"), &path);
        Place { mount, path, slots, port: free_port() }
    }

    fn model(&self) -> PathBuf {
        self.mount.join("models/tiny")
    }

    fn engine(&self, parameters: &[&str]) -> Engine {
        let port = format!("port={}", self.port);
        let mut engine =
            Engine::start_with(&self.path, &self.slots, &[&[port.as_str()], parameters].concat());
        assert_eq!(engine.address(), self.address());
        engine
    }

    /// Slots that share the cache.
    fn unified(&self, slots: u32) -> Engine {
        self.engine(&[&format!("n_parallel={slots}"), "kv_unified=true"])
    }

    fn watch(&self) -> Watch {
        Watch::start(&self.address(), &self.slots, &self.model())
    }

    fn address(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    #[track_caller]
    fn assert_nothing_is_left(&self) {
        assert_eq!(files(&self.slots), Vec::<PathBuf>::new(), "what was exchanged is left");
    }
}

/// A conversation that goes on: its prompt, and what is made of it by an engine that nobody interrupts.
fn follow(prompt: &[u8], answer: &[u8]) -> Vec<u8> {
    [prompt, answer, b" And she said, "].concat()
}

fn conversations_are_kept_without_anyone_asking(mode: Mode) {
    require!(xllamacpp);
    let place = Place::new(mode);
    let first = prompt();
    let mut engine = place.unified(2);
    let [first_answer, other_answer] =
        [&first[..], OTHER].map(|prompt| engine.complete_in(-1, prompt).tokens);
    let first_on = follow(&first, &first_answer);
    let other_on = follow(OTHER, &other_answer);
    let expected = [&first_on, &other_on].map(|prompt| engine.complete_in(-1, prompt).tokens);
    let last_on = follow(&other_on, &expected[1]);
    let last = engine.complete_in(-1, &last_on).tokens;
    engine.kill();

    let watch = place.watch();
    watch.wait_for_complaint("onnection refused");
    let mut engine = place.unified(2);
    watch.wait_for("answers again", 1);
    assert_eq!(engine.complete_in(-1, &first).tokens, first_answer);
    watch.wait_for("slot ", 1);
    assert_eq!(engine.complete_in(-1, OTHER).tokens, other_answer);
    watch.wait_for("slot ", 2);
    let saved = sequences(&place.model());
    assert_eq!(saved.len(), 2, "{saved:?}");
    assert!(saved[0].starts_with("ruth-1-1-now-it-came-to-pass-in-the-days."), "{saved:?}");
    assert!(saved[1].starts_with("where-was-ruth-born-and-when-did-she-go."), "{saved:?}");
    assert!(saved.iter().all(|name| name.contains("Z.tiny.")), "{saved:?}");
    // What has not changed is not saved again, and a conversation that goes on takes the place of what it was.
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(watch.said().matches("slot ").count(), 2, "{}", watch.said());
    assert_eq!(engine.complete_in(-1, &other_on).tokens, expected[1]);
    watch.wait_for("slot ", 3);
    let later = sequences(&place.model());
    assert!(later.len() == 2 && later[0] == saved[0] && later[1] != saved[1], "{later:?}");
    engine.kill();

    let mut engine = place.unified(2);
    watch.wait_for("tokens restored", 2);
    let found = engine.complete_in(-1, &first_on);
    assert_eq!(String::from_utf8_lossy(&found.tokens), String::from_utf8_lossy(&expected[0]));
    // The last token of an answer has no row yet.
    let held = first.len() + STEP_TOKENS - 1;
    assert_eq!((found.cached, found.computed), (held as u64, (first_on.len() - held) as u64));
    let found = engine.complete_in(-1, &other_on);
    assert_eq!(found.tokens, expected[1]);
    assert!(found.computed <= 2, "{} computed of {}", found.computed, other_on.len());
    // Where slots share a cache the engine has put it where there was room, and rows are not in the order of tokens.
    assert_eq!(engine.complete_in(-1, &last_on).tokens, last);
    watch.wait_for("/where-was-ruth-born", 4);
    engine.kill();
    let mut engine = place.unified(2);
    watch.wait_for("tokens restored", 4);
    let found = engine.complete_in(-1, &last_on);
    assert_eq!(String::from_utf8_lossy(&found.tokens), String::from_utf8_lossy(&last));
    assert!(found.computed <= 2, "{} computed of {}", found.computed, last_on.len());
    let (said, complained) = watch.end();
    let is_expected = |line: &str| {
        ["onnection", "Loading model", "cleared it before"].iter().any(|known| line.contains(known))
    };
    assert!(complained.lines().all(is_expected), "{said}{complained}");
    assert_eq!(sequences(&place.model()).len(), 2);
    place.assert_nothing_is_left();
    engine.kill();
}

/// What has changed since the last look is saved when the command is told to end.
#[test]
fn the_last_turn_is_saved_at_the_end() {
    require!(fuse, xllamacpp);
    let place = Place::new(Mode::Served);
    let mut engine = place.unified(1);
    let watch = place.watch();
    watch.wait_for("watched", 1);
    let first = engine.complete_in(-1, OTHER);
    // Whether a look has come between or not.
    let (said, complained) = watch.end();
    assert_eq!(complained, "", "{said}");
    assert_eq!(sequences(&place.model()).len(), 1, "{said}");
    // The next watch finds it as it was, and does not put it into another slot.
    let watch = place.watch();
    engine.complete_in(-1, &follow(OTHER, &first.tokens));
    watch.wait_for("slot 0", 1);
    assert_eq!(sequences(&place.model()).len(), 1);
    watch.end();
    place.assert_nothing_is_left();
    engine.kill();
}

/// Whoever knows a prompt before the server does can have it restored: it is not the latest conversation.
#[test]
fn a_prompt_is_restored_before_it_is_sent() {
    require!(fuse, xllamacpp);
    let place = Place::new(Mode::Served);
    let mut engine = place.unified(1);
    let watch = place.watch();
    let text = "Now it came to pass, when the judges ruled, that there was a famine.";
    let messages = json!([{ "role": "user", "content": "Who was Ruth?" }]);
    let chat = engine.ask("/apply-template", &json!({ "messages": messages }));
    for (number, prompt) in [text, chat["prompt"].as_str().unwrap()].into_iter().enumerate() {
        engine.ask("/completion", &json!({ "prompt": prompt, "n_predict": 4, "temperature": 0 }));
        watch.wait_for("slot 0", number + 1);
    }
    engine.complete_in(-1, OTHER);
    watch.wait_for("slot 0", 3);
    let saved = sequences(&place.model());
    assert!(saved.iter().any(|name| name.starts_with("who-was-ruth-")), "{saved:?}");
    watch.end();
    engine.kill();
    let chat = chat["prompt"].as_str().unwrap();
    let request = json!({ "messages": messages }).to_string();
    for (told, sent) in [(text, text), (&request, chat)] {
        let mut engine = place.unified(1);
        let file = place.mount.beside("prompt");
        std::fs::write(&file, told).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
        command.args(["slots", "restore", "--server", &place.address(), "--prompt"]).arg(file);
        command.arg("--directory").arg(&place.slots).arg(place.model());
        let said = forks::succeed(&mut command);
        let question = json!({ "prompt": sent, "n_predict": 4, "temperature": 0 });
        let answer = engine.ask("/completion", &question);
        assert_eq!(answer["timings"]["prompt_n"], 1, "{said}{answer}");
        engine.kill();
    }
    place.assert_nothing_is_left();
}

/// Servers that cannot do everything are told of in one line that says what to set.
#[test]
fn servers_that_lack_something() {
    require!(fuse, xllamacpp);
    let place = Place::new(Mode::Served);
    let check = |parameters: &[&str], expected: &[&str], saved: usize| {
        let mut engine = place.engine(parameters);
        let watch = place.watch();
        watch.wait_for_complaint(expected[0]);
        engine.complete_in(-1, OTHER);
        eventually("what is expected", || {
            let complained = watch.complained();
            let has_said = expected.iter().all(|expected| complained.contains(expected));
            (has_said && sequences(&place.model()).len() == saved).then_some(())
        });
        let (_, complained) = watch.end();
        assert_eq!(complained.lines().count(), expected.len(), "{complained}");
        place.assert_nothing_is_left();
        engine.kill();
    };
    check(&["endpoint_slots=false"], &["Start it with `--slots`"], 0);
    check(&["slot_save_path=\"\""], &["Start it with `--slot-save-path`", "slot 0: "], 0);
    let apart = ["n_parallel=2", "kv_unified=false"];
    check(&apart, &["a stream of its own", "--kv-unified"][..1], 1);
}

/// A conversation that is too long for the server's slots is left out, and the line says why.
#[test]
fn conversations_without_room() {
    require!(fuse, xllamacpp);
    let place = Place::new(Mode::Served);
    let mut engine = place.unified(1);
    let watch = place.watch();
    engine.complete_in(-1, &prompt());
    watch.wait_for("slot 0", 1);
    engine.kill();
    let engine = place.engine(&["n_ctx=512"]);
    watch.wait_for_complaint(
        "1337 tokens, and of the 512 that the server's slots share 512 are free",
    );
    watch.end();
    place.assert_nothing_is_left();
    engine.kill();
}

/// The mount goes away while the server goes on, and comes back.
#[test]
fn the_mount_goes_and_comes_back() {
    require!(fuse, xllamacpp);
    let mut place = Place::new(Mode::Served);
    let mut engine = place.unified(1);
    let watch = place.watch();
    let mut said = OTHER.to_vec();
    let mut go_on = |engine: &mut Engine| {
        let answer = engine.complete_in(-1, &said).tokens;
        said = follow(&said, &answer);
    };
    go_on(&mut engine);
    watch.wait_for("slot 0", 1);
    let first = sequences(&place.model());
    place.mount.kill();
    go_on(&mut engine);
    watch.wait_for_complaint("is gone");
    place.mount.mount();
    watch.wait_for("slot 0", 2);
    let second = sequences(&place.model());
    assert!(second.len() == 1 && second != first, "{first:?} {second:?}");
    // The same where it is unmounted: nothing keeps it busy.
    let complaints = || watch.complained().matches("is not in a mount of kvfs").count();
    let before = complaints();
    assert!(place.mount.unmount().success());
    go_on(&mut engine);
    eventually("a complaint", || (complaints() > before).then_some(()));
    place.mount.mount();
    watch.wait_for("slot 0", 3);
    assert_eq!(sequences(&place.model()).len(), 1);
    watch.end();
    place.assert_nothing_is_left();
    engine.kill();
}
