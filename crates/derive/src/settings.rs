//! Declares the keys of a config section on its struct, and the values of a choice on its enum. The
//! crate `settings` describes the attributes.

use crate::attribute::arguments;
use proc_macro2::TokenStream;
use quote::{format_ident, quote};
use syn::{
    Attribute, Data, DataStruct, DeriveInput, Error, Expr, ExprLit, Field, Fields, Ident, Lit,
    LitStr, Meta, Result, Type,
};

/// The first paragraph of a doc comment, without a full stop at its end.
fn doc(attributes: &[Attribute]) -> String {
    let lines = attributes.iter().filter(|attribute| attribute.path().is_ident("doc"));
    let lines = lines.filter_map(|attribute| match &attribute.meta {
        Meta::NameValue(doc) => match &doc.value {
            Expr::Lit(ExprLit { lit: Lit::Str(line), .. }) => Some(line.value().trim().to_owned()),
            _ => None,
        },
        _ => None,
    });
    let paragraph: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    let text = paragraph.join(" ");
    text.strip_suffix('.').map_or_else(|| text.clone(), str::to_owned)
}

struct Key {
    field: Ident,
    ty: Type,
    doc: String,
    default: Option<TokenStream>,
    is_neutral: bool,
    /// Range, expected values, hint.
    ranges: Vec<(TokenStream, TokenStream, TokenStream)>,
}

impl Key {
    /// Reads the attributes of a field, and leaves those of other macros.
    fn take(field: &mut Field) -> Result<Self> {
        let name = field.ident.clone().ok_or_else(|| Error::new_spanned(&*field, "no name"))?;
        let doc = doc(&field.attrs);
        if doc.is_empty() {
            return Err(Error::new_spanned(
                &name,
                "a key needs a doc comment: docs/config.md has it",
            ));
        }
        let mut key = Self {
            doc,
            default: is_option(&field.ty).then(|| quote!(::core::option::Option::None)),
            field: name,
            ty: field.ty.clone(),
            is_neutral: false,
            ranges: Vec::new(),
        };
        for attribute in &field.attrs {
            if attribute.path().is_ident("key") {
                for (name, value) in arguments(attribute, &["default", "neutral"])? {
                    match name.to_string().as_str() {
                        "default" if value.is_empty() => {
                            key.default = Some(quote!(::core::default::Default::default()));
                        }
                        "default" => key.default = Some(value),
                        "neutral" => key.is_neutral = true,
                        _ => {
                            return Err(Error::new(name.span(), "expected `default` or `neutral`"));
                        }
                    }
                }
            } else if attribute.path().is_ident("valid") {
                key.ranges.push(range(attribute)?);
            }
        }
        field.attrs.retain(|of| !of.path().is_ident("key") && !of.path().is_ident("valid"));
        Ok(key)
    }
}

fn range(attribute: &Attribute) -> Result<(TokenStream, TokenStream, TokenStream)> {
    let (mut range, mut expected) = (None, None);
    let mut hint = quote!(::core::option::Option::None);
    for (name, value) in arguments(attribute, &[])? {
        match name.to_string().as_str() {
            "range" => range = Some(value),
            "expected" => expected = Some(value),
            "hint" => hint = quote!(::core::option::Option::Some(#value)),
            _ => return Err(Error::new(name.span(), "expected `range`, `expected` or `hint`")),
        }
    }
    let missing = || Error::new_spanned(attribute, "`range` and `expected` are required");
    Ok((range.ok_or_else(missing)?, expected.ok_or_else(missing)?, hint))
}

fn is_option(ty: &Type) -> bool {
    let Type::Path(path) = ty else { return false };
    path.path.segments.last().is_some_and(|segment| segment.ident == "Option")
}

pub(crate) fn expand_section(mut item: DeriveInput) -> Result<TokenStream> {
    let Data::Struct(DataStruct { fields: Fields::Named(fields), .. }) = &mut item.data else {
        return Err(Error::new_spanned(&item.ident, "a section is a struct with named fields"));
    };
    let name = &item.ident;
    let keys = fields.named.iter_mut().map(Key::take).collect::<Result<Vec<_>>>()?;
    let mut functions = Vec::new();
    for (field, key) in fields.named.iter_mut().zip(&keys) {
        let Some(default) = &key.default else { continue };
        let function = format_ident!("default_{}", key.field);
        let path = LitStr::new(&format!("{name}::{function}"), key.field.span());
        field.attrs.push(syn::parse_quote!(#[serde(default = #path)]));
        let ty = &key.ty;
        functions.push(quote!(fn #function() -> #ty { #default }));
    }
    let default = keys.iter().all(|key| key.default.is_some()).then(|| {
        let fields = keys.iter().map(|key| &key.field);
        let functions = keys.iter().map(|key| format_ident!("default_{}", key.field));
        quote! {
            impl ::core::default::Default for #name {
                fn default() -> Self {
                    Self { #(#fields: Self::#functions()),* }
                }
            }
        }
    });
    let setting = setting(name, &keys);
    item.attrs.push(syn::parse_quote!(#[derive(::serde::Serialize, ::serde::Deserialize)]));
    item.attrs.push(syn::parse_quote!(#[serde(deny_unknown_fields)]));
    Ok(quote! {
        #item
        impl #name { #(#functions)* }
        #default
        #setting
    })
}

fn setting(name: &Ident, keys: &[Key]) -> TokenStream {
    let described = keys.iter().map(|key| {
        let Key { field, ty, doc, default, is_neutral, ranges } = key;
        let text = field.to_string();
        let function = format_ident!("default_{field}");
        let default = if default.is_some() {
            quote!(::core::option::Option::Some(
                ::settings::to_value(Self::#function()).expect("a plain value")
            ))
        } else {
            quote!(::core::option::Option::None)
        };
        let ranges = ranges
            .iter()
            .map(|(range, expected, _)| quote!((::settings::range(#range), #expected)));
        quote! {
            ::settings::Key {
                name: #text,
                doc: #doc,
                default: #default,
                is_neutral: #is_neutral,
                kind: <#ty as ::settings::Setting>::kind(),
                ranges: ::std::vec![#(#ranges),*],
            }
        }
    });
    let fields: Vec<_> = keys.iter().map(|key| &key.field).collect();
    let names: Vec<_> = fields.iter().map(ToString::to_string).collect();
    let checks = keys.iter().map(|key| {
        let (field, name) = (&key.field, key.field.to_string());
        let rules = key
            .ranges
            .iter()
            .map(|(range, expected, hint)| quote!((::settings::range(#range), #expected, #hint)));
        quote! {
            let key = ::settings::join(at, #name);
            ::settings::check(&self.#field, &key, &[#(#rules),*], errors);
            ::settings::Setting::check_values(&self.#field, &key, errors);
        }
    });
    let text = name.to_string();
    quote! {
        impl ::settings::Setting for #name {
            fn kind() -> ::settings::Kind {
                ::settings::Kind::Section(#text, ::std::vec![#(#described),*])
            }

            fn paths(
                &mut self,
                at: &str,
                visit: &mut dyn ::core::ops::FnMut(&str, &mut ::std::path::PathBuf),
            ) {
                #(::settings::Setting::paths(&mut self.#fields, &::settings::join(at, #names), visit);)*
            }

            fn check_values(
                &self,
                at: &str,
                errors: &mut ::std::vec::Vec<::settings::ValueError>,
            ) {
                #(#checks)*
            }
        }
    }
}

pub(crate) fn expand_choice(input: &DeriveInput) -> Result<TokenStream> {
    let Data::Enum(of) = &input.data else {
        return Err(Error::new_spanned(&input.ident, "a choice is an enum"));
    };
    let (mut variants, mut names, mut docs) = (Vec::new(), Vec::new(), Vec::new());
    for variant in &of.variants {
        variants.push(&variant.ident);
        names.push(renamed(&variant.attrs)?.unwrap_or_else(|| snake_case(&variant.ident)));
        docs.push(doc(&variant.attrs));
    }
    let name = &input.ident;
    Ok(quote! {
        impl #name {
            /// The value in a config.
            pub fn name(self) -> &'static str {
                match self { #(Self::#variants => #names),* }
            }
        }

        impl ::settings::Setting for #name {
            fn kind() -> ::settings::Kind {
                ::settings::Kind::Choice(::std::vec![#((#names, #docs)),*])
            }
        }
    })
}

/// The name in `#[serde(rename = "..")]`.
fn renamed(attributes: &[Attribute]) -> Result<Option<String>> {
    let mut name = None;
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("serde")) {
        attribute.parse_nested_meta(|meta| {
            if meta.path.is_ident("rename") {
                name = Some(meta.value()?.parse::<LitStr>()?.value());
            }
            Ok(())
        })?;
    }
    Ok(name)
}

/// As `#[serde(rename_all = "snake_case")]`.
fn snake_case(name: &Ident) -> String {
    let mut snake = String::new();
    for letter in name.to_string().chars() {
        if letter.is_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.extend(letter.to_lowercase());
    }
    snake
}

#[cfg(test)]
mod tests {
    use super::*;
    use syn::parse_quote;

    #[test]
    fn wrong_attributes_and_a_missing_meaning_are_named() {
        let with = |field: TokenStream| {
            let input = parse_quote!(
                struct S {
                    #field
                    key: f64,
                }
            );
            expand_section(input).err().map_or_else(String::new, |error| error.to_string())
        };
        for (field, message) in [
            (quote!(), "a key needs a doc comment: docs/config.md has it"),
            (quote!(#[doc = "a"] #[key(range = 1)]), "expected `default` or `neutral`"),
            (
                quote!(#[doc = "a"] #[key(default = )]),
                "`default` has no value: write `default = ..`",
            ),
            (quote!(#[doc = "a"] #[key(default = 1.0, default)]), "`default` is given twice"),
            (quote!(#[doc = "a"] #[valid(range = ..1.0)]), "`range` and `expected` are required"),
            (quote!(#[doc = "a"] #[valid(most = 1.0)]), "expected `range`, `expected` or `hint`"),
            (quote!(#[doc = "a"] #[valid(range = 0.0.., expected = "0 or more")]), ""),
        ] {
            assert_eq!(with(field.clone()), message, "{field}");
        }
        let unnamed = expand_section(parse_quote!(
            struct S(f64);
        ))
        .unwrap_err()
        .to_string();
        assert_eq!(unnamed, "a section is a struct with named fields");
        let no_enum = expand_choice(&parse_quote!(
            struct S;
        ))
        .unwrap_err()
        .to_string();
        assert_eq!(no_enum, "a choice is an enum");
    }
}
