//! Sealed and growing files stand where they mean what they were made as.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use super::image::Image;
use crate::ingest::model::{ManifestError, Model};
use crate::ingest::seal::SealedPlace;
use crate::page::PageError;
use crate::page::classify::{self, FileClass};
use crate::page::names;
use crate::store::StoreError;
use crate::store::disk::Access;
use crate::store::record::{DirectoryClass, Inode, InodeId, Kind, ObjectId, PageRecord, Role};

/// What a name turned out to be.
enum Verdict {
    Fits,
    /// The file is sound but cannot stand there.
    Misplaced(String),
    /// The file is not what it was sealed as.
    Damaged(String),
    /// Only the role is out of date.
    NewRole(Role),
}

/// The manifests in use, by model directory; `None` for one that cannot be read.
struct Models {
    manifests: HashMap<InodeId, InodeId>,
    loaded: BTreeMap<InodeId, Option<Rc<Model>>>,
}

pub(super) fn check(image: &mut Image<'_>) -> Result<(), StoreError> {
    let manifests = image
        .names
        .iter()
        .filter(|name| name.kept && name.name == names::MANIFEST.as_bytes())
        .map(|name| (name.parent, name.inode))
        .collect();
    let mut models = Models { manifests, loaded: BTreeMap::new() };
    for index in 0..image.names.len() {
        if !image.names[index].kept {
            continue;
        }
        match check_name(image, &mut models, index)? {
            Verdict::Fits => {}
            Verdict::Misplaced(why) => {
                let what = format!("{}: {why}; the name is removed", image.path_of(index));
                image.find(&what, true);
                image.remove_name(index);
            }
            Verdict::Damaged(why) => {
                image.lost.insert(image.names[index].inode, why);
            }
            Verdict::NewRole(role) => {
                let what = format!("{}: marked as another kind of file", image.path_of(index));
                image.find(&what, true);
                let id = image.names[index].inode;
                if let Some(mut inode) = image.inodes.get(&id).cloned() {
                    if let Some(file) = inode.file_mut() {
                        file.role = role;
                    }
                    image.put_inode(id, inode);
                }
            }
        }
    }
    Ok(())
}

fn check_name(
    image: &mut Image<'_>, models: &mut Models, index: usize,
) -> Result<Verdict, StoreError> {
    let (parent, inode) = (image.names[index].parent, image.names[index].inode);
    let Some(directory) = image.class(parent) else {
        return Ok(Verdict::Fits);
    };
    let class = class_of(image, models, index, directory)?;
    let Some(record) = image.inodes.get(&inode) else {
        return Ok(Verdict::Fits);
    };
    let misplaced = |what: &str| Ok(Verdict::Misplaced(what.to_owned()));
    let Some(file) = record.file() else {
        return if record.is_directory() || class == FileClass::Plain {
            Ok(Verdict::Fits)
        } else {
            misplaced("no ordinary file, stands where one must be")
        };
    };
    let (role, object) = (file.role, file.object);
    match (role, class) {
        (_, FileClass::Reserved) => misplaced("nothing can stand there"),
        (Role::Tail { .. } | Role::Tokens, FileClass::Plain) => Ok(Verdict::NewRole(Role::Plain)),
        (Role::Tokens, FileClass::Tokens)
        | (Role::Manifest, FileClass::Manifest)
        | (_, FileClass::Plain)
        // Made before there was a manifest, or by a kvfs that did not seal states: nobody relies on it.
        | (Role::Plain, FileClass::State(_)) => Ok(Verdict::Fits),
        (Role::Tail { start, directory }, FileClass::Tail(there)) if start == there => {
            let directory_fits = directory == parent;
            Ok(if directory_fits {
                Verdict::Fits
            } else {
                Verdict::NewRole(Role::Tail { start, directory: parent })
            })
        }
        (Role::Page(page), FileClass::Page(start) | FileClass::State(start)) => {
            let is_state = matches!(class, FileClass::State(_));
            if page.start != start
                || page.is_state() != is_state
                || directory != DirectoryClass::Layer(page.layer)
            {
                return misplaced("holds the page of another place");
            }
            check_page(image, models, (parent, object), &page)
        }
        (Role::Plain, FileClass::Page(_) | FileClass::Manifest) => {
            Ok(Verdict::Damaged("was never sealed".to_owned()))
        }
        _ => misplaced("holds another kind of file"),
    }
}

/// A page's header is that of its place in the model above.
fn check_page(
    image: &mut Image<'_>, models: &mut Models, (directory, object): (InodeId, Option<ObjectId>),
    page: &PageRecord,
) -> Result<Verdict, StoreError> {
    let Some(model) = model_above(image, models, directory)? else {
        return Ok(Verdict::Fits);
    };
    if model.identity.0 != page.model {
        return Ok(Verdict::Misplaced("holds a page of another model".to_owned()));
    }
    let place = match place_of(&model, page) {
        Ok(place) => place,
        Err(error) => return Ok(Verdict::Damaged(error.to_string())),
    };
    let Some(object) = object else {
        return Ok(Verdict::Fits);
    };
    if image.encoded.contains_key(&object) || image.is_in_remote(object) {
        // The raw file may be half of what came back from there, which is checked later: that copy
        // is the page.
        return Ok(Verdict::Fits);
    }
    // That the file is there at all is checked for every object later.
    let Ok(file) = image.store.open_object(object, Access::Read) else {
        return Ok(Verdict::Fits);
    };
    let mut first = vec![0; 4096];
    let count = file.read_at(&mut first, 0)?;
    image.report.bytes_read += count as u64;
    let length = file.stat()?.length;
    let first = &first[..count];
    let is_same = match &place {
        SealedPlace::Page(place) => {
            place.check_header(first, length).map(|header| header.tokens == page.tokens)
        }
        SealedPlace::State(place) => {
            place.check_header(first, length).map(|header| page.is_state_of(header.prefix))
        }
    };
    Ok(match is_same {
        Ok(true) => Verdict::Fits,
        Ok(false) => Verdict::Damaged("its header tells of other tokens".to_owned()),
        Err(error) => Verdict::Damaged(error.to_string()),
    })
}

fn place_of(model: &Model, page: &PageRecord) -> Result<SealedPlace, PageError> {
    if page.is_state() {
        let place = model.state_place(page.layer, page.start)?;
        return Ok(SealedPlace::State(Box::new(place)));
    }
    model.place(page.layer, page.start).map(SealedPlace::Page)
}

/// What a name means: that of a state means something only in a model that says what its states are.
fn class_of(
    image: &mut Image<'_>, models: &mut Models, index: usize, directory: DirectoryClass,
) -> Result<FileClass, StoreError> {
    let class = classify::file(directory, &image.names[index].name);
    if !matches!(class, FileClass::State(_)) {
        return Ok(class);
    }
    let model = model_above(image, models, image.names[index].parent)?;
    Ok(class.in_model(model.is_some_and(|model| model.manifest.describes_states())))
}

fn model_above(
    image: &mut Image<'_>, models: &mut Models, directory: InodeId,
) -> Result<Option<Rc<Model>>, StoreError> {
    let Some(id) = model_directory(image, directory) else {
        return Ok(None);
    };
    if let Some(model) = models.loaded.get(&id) {
        return Ok(model.clone());
    }
    let manifest = models.manifests.get(&id);
    let object = manifest
        .and_then(|id| image.inodes.get(id))
        .and_then(Inode::file)
        .and_then(|file| file.object);
    let outcome = object.map(|object| Model::load(image.store, object));
    let is_away = object.is_some_and(|object| image.is_in_remote(object));
    let (model, problem) = match outcome {
        Some(Err(ManifestError::Io(error)))
            if is_away && error.kind() == std::io::ErrorKind::NotFound =>
        {
            (None, None)
        }
        None => (None, Some("is missing".to_owned())),
        Some(Ok(model)) => (Some(Rc::new(model)), None),
        Some(Err(ManifestError::Refused(error))) => (None, Some(error.to_string())),
        Some(Err(ManifestError::Io(error))) if error.kind() == std::io::ErrorKind::NotFound => {
            (None, Some("its bytes are missing".to_owned()))
        }
        Some(Err(ManifestError::Io(error))) => return Err(error.into()),
    };
    if let Some(problem) = problem {
        let path = image.path(id, names::MANIFEST.as_bytes());
        let what = format!(
            "{path}: {problem}; the pages of the model cannot be compared with it: create it anew"
        );
        image.find(&what, false);
    }
    models.loaded.insert(id, model.clone());
    Ok(model)
}

fn model_directory(image: &Image<'_>, directory: InodeId) -> Option<InodeId> {
    let mut at = directory;
    // Every directory hangs at the root by now, so this ends.
    while at != InodeId::ROOT {
        match image.inodes.get(&at)?.kind {
            Kind::Directory { class: DirectoryClass::Model, .. } => return Some(at),
            Kind::Directory { parent, .. } => at = parent,
            _ => return None,
        }
    }
    None
}
