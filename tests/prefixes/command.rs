//! `kvfs match`.

use std::path::Path;
use std::process::Command;

use crate::common::{Mode, Model, Mount};
use crate::writer::{Sequence, bytes};

in_both_modes!(the_command_answers);

fn run(tokens: &Path, model: &Path, json: bool) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.arg("match").arg("--tokens").arg(tokens).args(json.then_some("--json")).arg(model);
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(text).unwrap())
}

fn the_command_answers(mode: Mode) {
    let (mount, model) = (Mount::new(mode), Model::small());
    model.install(&mount);
    let directory = model.directory(&mount);
    let prompt = mount.beside("prompt");
    std::fs::write(&prompt, bytes(&[5, 6, 7, 9])).unwrap();
    let (exit, text) = run(&prompt, &directory, false);
    assert_eq!(exit, Some(0), "{text}");
    assert!(
        text.contains("tokens: 0\nprompt_tokens: 4\nsequence: none begins like it\n"),
        "{text}"
    );
    let mut sequence = Sequence::new(&model, "chat");
    sequence.append(&mount, &model, &[5, 6, 7, 8]);
    let (exit, text) = run(&prompt, &directory, true);
    let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((exit, &answer["tokens"]), (Some(0), &3.into()));
    let path = model.sequence(&mount, "chat");
    assert_eq!(answer["sequence"].as_str(), path.to_str());
    let check = |bytes: &[u8], model: &Path, expected: &str| {
        std::fs::write(&prompt, bytes).unwrap();
        let (exit, text) = run(&prompt, model, false);
        assert_eq!(exit, Some(1), "{text}");
        assert!(text.contains(expected) && text.lines().count() == 1, "{text}");
    };
    check(b"12345", &directory, "5 bytes are no whole token ids");
    check(b"1234", &mount.files(""), "name MOUNT/models/NAME");
    check(b"1234", &mount.join("models/absent"), "name MOUNT/models/NAME");
    let (exit, text) = run(Path::new("/nonexistent"), &directory, false);
    assert_eq!(exit, Some(1));
    assert!(text.contains("/nonexistent"), "{text}");
}
