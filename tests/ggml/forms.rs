//! Every form in which the engine saves what it computed, as pages and back: V of engines without flash
//! attention, quantised rows, sessions of a whole context.

use std::path::{Path, PathBuf};

use crate::common::mount::scratch_directory;
use crate::common::{Mode, Mount};
use crate::conversation::kvfs;
use crate::engine::{Ran, ran};
use crate::gguf::Model;
use crate::program::run;

/// Of the spread of the logits. Without flash attention the engine rounds elsewhere.
const TOLERANCE: f32 = 4e-3;
/// The same where attention over quantised rows ran in kvfs, which does not quantise queries.
const QUANTISED_TOLERANCE: f32 = 2e-2;

/// What the engine saves, and how kvfs is told.
struct Form {
    name: &'static str,
    engine: &'static str,
    create: &'static [&'static str],
    export: &'static [&'static str],
}

const FORMS: [Form; 6] = [
    Form { name: "v", engine: "--flash off", create: &[], export: &["--transposed-v"] },
    Form {
        name: "session",
        engine: "--flash on --session 1",
        create: &[],
        export: &["--session", "llama"],
    },
    Form {
        name: "v_session",
        engine: "--flash off --session 1",
        create: &[],
        export: &["--session", "llama", "--transposed-v"],
    },
    Form {
        name: "bf16",
        engine: "--flash on --type bf16",
        create: &["--dtype", "bf16"],
        export: &[],
    },
    Form { name: "q8_0", engine: "--flash on --type q8_0", create: &Q8_0, export: &[] },
    Form {
        name: "q4_0",
        engine: "--flash on --type q4_0",
        create: &["--dtype", "q4_0", "--kv-rotation", "true"],
        export: &[],
    },
];
const Q8_0: [&str; 4] = ["--dtype", "q8_0", "--kv-rotation", "true"];

/// A mount with models, the engine's model beside it.
struct Place {
    mount: Mount,
    directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let directory = scratch_directory();
        let place = Self { mount: Mount::new(Mode::Passthrough), directory };
        Model::write_tiny(&place.gguf());
        place
    }

    fn gguf(&self) -> PathBuf {
        self.directory.path().join("tiny.gguf")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// What an engine without kvfs computed of the prompt.
    fn save(&self, engine: &str, to: &Path) {
        let save = format!("{engine} --prompt-tokens 300 --predict 0 --save {}", to.display());
        ran(&self.gguf(), &save, None);
    }

    /// The tokens that an engine without kvfs goes on with.
    fn go_on(&self, engine: &str, from: &Path, as_before: Option<&Ran>) -> Ran {
        let load = format!("{engine} --predict 16 --load {}", from.display());
        match as_before {
            Some(before) => before.followed(&self.gguf(), &load, None),
            None => ran(&self.gguf(), &load, None),
        }
    }

    fn create(&self, name: &str, options: &[&str]) -> PathBuf {
        let model = self.mount.join("models").join(name);
        let mut create = kvfs("create", &[&model]);
        create.args(["--layers", "4", "--kv-heads", "2", "--head-dim", "64"]);
        run(create.args(["--page-tokens", "128", "--layout", "nhd"]).args(options));
        model
    }

    fn export(&self, sequence: &Path, options: &[&str]) -> PathBuf {
        let to = self.file("exported");
        run(kvfs("export", &[sequence, &to]).args(options));
        to
    }
}

#[test]
fn each_form_comes_back_byte_for_byte() {
    require!(fuse, llama, cc);
    let place = Place::new();
    for Form { name, engine, create, export } in FORMS {
        let saved = place.file(name);
        place.save(engine, &saved);
        let sequence = place.create(name, create).join("sequences/chat");
        run(&mut kvfs("import", &[&saved, &sequence]));
        let exported = place.export(&sequence, export);
        assert!(std::fs::read(exported).unwrap() == std::fs::read(saved).unwrap(), "{name}");
    }
}

/// An engine with flash attention goes on from what one without it has computed, and the other way.
#[test]
fn engines_with_and_without_flash_attention_take_each_others() {
    require!(fuse, llama, cc);
    let place = Place::new();
    let model = place.create("tiny", &[]);
    for (from, to, export) in [("off", "on", &[][..]), ("on", "off", &["--transposed-v"])] {
        let (saved, sequence) = (place.file(from), model.join("sequences").join(from));
        let [from, to] = [from, to].map(|flash| format!("--flash {flash}"));
        place.save(&from, &saved);
        let expected = place.go_on(&from, &saved, None);
        run(&mut kvfs("import", &[&saved, &sequence]));
        let exported = place.export(&sequence, export);
        place.go_on(&to, &exported, Some(&expected)).assert_like(&expected, TOLERANCE);
    }
    // What the first layer keeps depends on no attention: its pages are the same files.
    let page = |name: &str| model.join("sequences").join(name).join("000/0000128.safetensors");
    assert!(std::fs::read(page("off")).unwrap() == std::fs::read(page("on")).unwrap());
}

/// Quantised rows are found in `slots/`, and mapped into an engine with the backend.
#[test]
fn quantised_rows_are_slots_and_references() {
    require!(fuse, llama, cc);
    let place = Place::new();
    let (saved, engine) = (place.file("saved"), "--flash on --type q8_0");
    place.save(engine, &saved);
    let expected = place.go_on(engine, &saved, None);
    let model = place.create("tiny", &Q8_0);
    run(&mut kvfs("import", &[&saved, &model.join("sequences/chat")]));
    let slots = model.join("slots");
    assert!(std::fs::read(slots.join("chat.bin")).unwrap() == std::fs::read(&saved).unwrap());
    let load = format!("{engine} --predict 16 --load {}", slots.join("chat.ref").display());
    let mut command = crate::engine::command(&place.gguf(), &load, Some(place.mount.path()));
    let tokens = place.file("tokens");
    let followed: Vec<u8> = expected.tokens.iter().flat_map(|token| token.to_ne_bytes()).collect();
    std::fs::write(&tokens, followed).unwrap();
    command.env("KVFS_MODEL", &model).arg("--follow").arg(tokens);
    let restored = crate::engine::finish(None, &mut command);
    restored.assert_attention_was_ours();
    restored.assert_like(&expected, QUANTISED_TOLERANCE);
}

#[test]
fn what_does_not_say_whether_it_is_rotated_is_refused() {
    require!(fuse, llama, cc);
    let place = Place::new();
    let saved = place.file("saved");
    place.save("--flash on --type q8_0", &saved);
    for (name, options, line) in [
        ("untold", &["--dtype", "q8_0"][..], "kvfs create --kv-rotation true"),
        ("f16", &[], "layer 0 has K of ggml type 8, the manifest's dtype is 1"),
        ("named", &["--dtype", "q8_0", "--kv-rotation", "random"], "whose kv_rotation is random"),
    ] {
        let sequence = place.create(name, options).join("sequences/chat");
        let output = kvfs("import", &[&saved, &sequence]).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), error.lines().count()), (Some(1), 1), "{error}");
        assert!(error.contains(line), "{error}");
        assert!(!sequence.exists(), "half a sequence is left");
    }
}
