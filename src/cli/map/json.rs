//! The map for programs: each page.

use serde_json::{Value, json};

use super::gather::{Content, LayerPages, Subject};
use super::page::{Kind, Page};

pub(super) fn of(subject: &Subject) -> Value {
    let mut value = json!({ "path": subject.path, "page_tokens": subject.page_tokens });
    match &subject.content {
        Content::Sequence(layers) => {
            value["kind"] = "sequence".into();
            value["layers"] = layers.iter().map(layer).collect();
        }
        Content::Model(sequences) => {
            let sequence = |(name, layers): &(String, Vec<LayerPages>)| json!({ "name": name, "layers": layers.iter().map(layer).collect::<Vec<_>>() });
            value["kind"] = "model".into();
            value["sequences"] = sequences.iter().map(sequence).collect();
        }
    }
    value
}

fn layer(layer: &LayerPages) -> Value {
    let pages: Vec<Value> = layer.pages.iter().map(page).collect();
    json!({ "layer": layer.layer, "keeps_pages": layer.keeps_pages, "pages": pages })
}

fn page(page: &Page) -> Value {
    json!({
        "kind": match page.kind {
            Kind::Page => "page",
            Kind::Tail => "tail",
            Kind::State => "state",
        },
        "start": page.start,
        "place": page.place.name(),
        "encoding": page.encoding,
        "bytes": page.bytes,
        "used_seconds": page.used_seconds,
        "links": page.links,
        "pinned": page.is_pinned,
        "lossy": page.is_lossy,
    })
}
