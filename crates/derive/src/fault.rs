//! Derives the trait `Fault` of the crate `fault`, which describes the attribute.

use crate::attribute::{arguments, given_twice};
use proc_macro2::{Ident, Span, TokenStream};
use quote::{format_ident, quote};
use syn::{Attribute, Data, DeriveInput, Error, Fields, LitStr, Result};

/// The field whose error gives what an attribute does not.
struct FromField {
    at: Span,
    /// `None` for the only field.
    field: Option<Ident>,
}

/// The content of `#[fault(..)]`.
#[derive(Default)]
struct Settings {
    exit: Option<TokenStream>,
    hint: Option<TokenStream>,
    reason: Option<LitStr>,
    from: Option<FromField>,
}

impl Settings {
    /// The settings of an enum, a variant or a struct.
    fn from_attributes(attributes: &[Attribute]) -> Result<Self> {
        let mut settings = Self::default();
        let mut is_transparent = false;
        for attribute in attributes {
            if attribute.path().is_ident("fault") {
                settings.add(attribute)?;
            } else if attribute.path().is_ident("error") {
                let text = attribute.parse_args::<Ident>();
                is_transparent |= text.is_ok_and(|text| text == "transparent");
            }
        }
        if is_transparent && settings.exit.is_none() && settings.hint.is_none() {
            let from = || FromField { at: Span::call_site(), field: None };
            settings.from.get_or_insert_with(from);
        }
        Ok(settings)
    }

    fn add(&mut self, attribute: &Attribute) -> Result<()> {
        for (key, value) in arguments(attribute, &["from"])? {
            let is_new = match key.to_string().as_str() {
                "exit" => self.exit.replace(value).is_none(),
                "hint" => self.hint.replace(value).is_none(),
                "reason" => self.reason.replace(syn::parse2(value)?).is_none(),
                "from" => {
                    let field = if value.is_empty() { None } else { Some(syn::parse2(value)?) };
                    self.from.replace(FromField { at: key.span(), field }).is_none()
                }
                _ => {
                    let expected = "expected `exit`, `hint`, `reason` or `from`";
                    return Err(Error::new(key.span(), expected));
                }
            };
            if !is_new {
                return Err(given_twice(&key));
            }
        }
        Ok(())
    }
}

/// The bodies of the three functions for one variant or struct.
struct Arm {
    name: Ident,
    pattern: TokenStream,
    exit: TokenStream,
    hint: TokenStream,
    reason: Option<TokenStream>,
    has_own_reason: bool,
}

impl Arm {
    /// `default` has the settings of the enum.
    fn new(
        name: &Ident,
        path: &TokenStream,
        fields: &Fields,
        own: Settings,
        default: &Settings,
    ) -> Result<Self> {
        let names: Vec<Ident> = fields
            .iter()
            .enumerate()
            .map(|(index, field)| field.ident.clone().unwrap_or_else(|| format_ident!("_{index}")))
            .collect();
        let pattern = match fields {
            Fields::Named(_) => quote!(#path { #(#names),* }),
            Fields::Unnamed(_) => quote!(#path(#(#names),*)),
            Fields::Unit => quote!(#path),
        };
        let from = own.from.map(|from| from.find(name, &names)).transpose()?;
        let function = |function: &str| {
            let (from, function) = (from.as_ref()?, format_ident!("{function}"));
            Some(quote!({ use ::fault::Fault as _; #from.#function() }))
        };
        let default = if from.is_some() { &Settings::default() } else { default };
        let missing = |key: &str| {
            let text = format!(
                "no `{key}`: write `{key} = ..` here or on the enum (`{key} = None` if there is none), or `from`"
            );
            Error::new(name.span(), text)
        };
        let exit = own.exit.as_ref().or(default.exit.as_ref()).map(exit);
        let hint = own.hint.as_ref().or(default.hint.as_ref()).map(hint);
        let reason = own.reason.as_ref().or(default.reason.as_ref()).map(|text| quote!(#text));
        Ok(Self {
            name: name.clone(),
            has_own_reason: own.reason.is_some(),
            pattern,
            exit: exit.or_else(|| function("exit")).ok_or_else(|| missing("exit"))?,
            hint: hint.or_else(|| function("hint")).ok_or_else(|| missing("hint"))?,
            reason: reason.or_else(|| function("reason")),
        })
    }
}

impl FromField {
    /// The field among `names`, the fields of the variant or struct `name`.
    fn find(self, name: &Ident, names: &[Ident]) -> Result<Ident> {
        match (self.field, names) {
            (Some(field), names) if names.contains(&field) => Ok(field),
            (Some(field), _) => {
                Err(Error::new(field.span(), format!("`{name}` has no field `{field}`")))
            }
            (None, [only]) => Ok(only.clone()),
            (None, names) => {
                let text = format!("`{name}` has {} fields: write `from = FIELD`", names.len());
                Err(Error::new(self.at, text))
            }
        }
    }
}

fn is_none(value: &TokenStream) -> bool {
    syn::parse2::<Ident>(value.clone()).is_ok_and(|name| name == "None")
}

/// A name alone is a variant of `Exit`.
fn exit(value: &TokenStream) -> TokenStream {
    match syn::parse2::<Ident>(value.clone()) {
        _ if is_none(value) => quote!(::core::option::Option::None),
        Ok(variant) => quote!(::core::option::Option::Some(::fault::Exit::#variant)),
        Err(_) => quote!(::core::convert::Into::into(#value)),
    }
}

fn hint(value: &TokenStream) -> TokenStream {
    match syn::parse2::<LitStr>(value.clone()) {
        _ if is_none(value) => quote!(::core::option::Option::None),
        Ok(text) if text.value().contains(['{', '}']) => {
            quote!(::fault::IntoHint::into_hint(::std::format!(#text)))
        }
        _ => quote!(::fault::IntoHint::into_hint(#value)),
    }
}

pub(crate) fn expand(input: &DeriveInput) -> Result<TokenStream> {
    let own = Settings::from_attributes(&input.attrs)?;
    let mut arms = Vec::new();
    match &input.data {
        Data::Enum(data) => {
            if let Some(from) = own.from {
                return Err(Error::new(from.at, "`from` belongs to a variant, not to the enum"));
            }
            for variant in &data.variants {
                let (name, settings) = (&variant.ident, Settings::from_attributes(&variant.attrs)?);
                arms.push(Arm::new(name, &quote!(Self::#name), &variant.fields, settings, &own)?);
            }
        }
        Data::Struct(data) => {
            let (name, path) = (&input.ident, quote!(Self));
            arms.push(Arm::new(name, &path, &data.fields, own, &Settings::default())?);
        }
        Data::Union(_) => {
            let text = "`Fault` cannot be derived for a union";
            return Err(Error::new(input.ident.span(), text));
        }
    }
    let has_reason = arms.iter().any(|arm| arm.has_own_reason);
    if let Some(arm) = arms.iter().find(|arm| has_reason && arm.reason.is_none()) {
        let text = format!("`{}` has no `reason`, but other variants do", arm.name);
        return Err(Error::new(arm.name.span(), text));
    }
    let patterns: Vec<_> = arms.iter().map(|arm| &arm.pattern).collect();
    let exits = arms.iter().map(|arm| &arm.exit);
    let hints = arms.iter().map(|arm| &arm.hint);
    let reasons: Option<Vec<_>> = arms.iter().map(|arm| arm.reason.as_ref()).collect();
    let reason = reasons.map(|reasons| {
        quote! {
            fn reason(&self) -> &'static str {
                match self { #(#patterns => #reasons),* }
            }
        }
    });
    let name = &input.ident;
    let (generics, arguments, bounds) = input.generics.split_for_impl();
    Ok(quote! {
        #[automatically_derived]
        #[allow(unused_variables, clippy::all, clippy::pedantic)]
        impl #generics ::fault::Fault for #name #arguments #bounds {
            fn exit(&self) -> ::core::option::Option<::fault::Exit> {
                match self { #(#patterns => #exits),* }
            }
            fn hint(&self) -> ::fault::Hint {
                match self { #(#patterns => #hints),* }
            }
            #reason
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use syn::parse_quote;

    /// The error messages of an input; empty if it has none.
    fn messages(input: &DeriveInput) -> String {
        expand(input).err().map_or_else(String::new, |error| error.to_string())
    }

    #[track_caller]
    fn assert_valid(input: &DeriveInput) -> String {
        expand(input).unwrap_or_else(|error| panic!("{error}")).to_string()
    }

    #[test]
    fn an_exit_code_and_a_hint_are_required() {
        let no_exit = parse_quote!(
            enum E {
                #[fault(hint = "a")]
                A,
            }
        );
        assert_eq!(
            messages(&no_exit),
            "no `exit`: write `exit = ..` here or on the enum (`exit = None` if there is none), or `from`"
        );
        let no_hint = parse_quote!(
            #[fault(exit = Usage)]
            enum E {
                A,
            }
        );
        assert!(messages(&no_hint).starts_with("no `hint`: "));
        let of_the_enum_is_not_for_from = parse_quote!(
            #[fault(exit = Usage, hint = None)]
            enum E {
                #[fault(from, exit = Data)]
                A(B),
            }
        );
        let code = assert_valid(&of_the_enum_is_not_for_from);
        assert!(code.contains("_0 . hint ()") && !code.contains("Usage"), "{code}");
        let without = parse_quote!(
            #[fault(exit = None)]
            enum E {
                #[fault(hint = None)]
                A,
            }
        );
        assert_valid(&without);
    }

    #[test]
    fn a_transparent_variant_has_all_from_its_field_unless_it_gives_an_exit_code_or_a_hint() {
        let bare = parse_quote!(
            enum E {
                #[error(transparent)]
                A(#[from] B),
            }
        );
        let code = assert_valid(&bare);
        assert!(code.contains("_0 . exit ()") && code.contains("_0 . hint ()"), "{code}");
        let with_exit = parse_quote!(
            enum E {
                #[error(transparent)]
                #[fault(exit = None, hint = None)]
                A(#[from] B),
            }
        );
        let code = assert_valid(&with_exit);
        assert!(!code.contains("_0 ."), "{code}");
    }

    #[test]
    fn wrong_attributes_are_named() {
        let with = |attribute: TokenStream| {
            messages(&parse_quote!(
                enum E {
                    #[fault(exit = Usage, hint = None)]
                    A,
                    #attribute
                    B { cause: C, place: u8 },
                }
            ))
        };
        for (attribute, message) in [
            (quote!(#[fault(code = Data)]), "expected `exit`, `hint`, `reason` or `from`"),
            (quote!(#[fault(exit = Data, exit = Usage)]), "`exit` is given twice"),
            (quote!(#[fault(hint = "a")] #[fault(hint = "b")]), "`hint` is given twice"),
            (quote!(#[fault(exit =)]), "`exit` has no value: write `exit = ..`"),
            (quote!(#[fault(exit, hint = "a")]), "`exit` has no value: write `exit = ..`"),
            (quote!(#[fault(from =)]), "`from` has no value: write `from = ..`"),
            (quote!(#[fault(from)]), "`B` has 2 fields: write `from = FIELD`"),
            (quote!(#[fault(from = other)]), "`B` has no field `other`"),
            (quote!(#[fault(reason = f())]), "expected string literal"),
            (
                quote!(#[fault(exit = Data, hint = None, reason = "b")]),
                "`A` has no `reason`, but other variants do",
            ),
        ] {
            assert_eq!(with(attribute.clone()), message, "{attribute}");
        }
    }

    #[test]
    fn attributes_in_the_wrong_place_are_named() {
        let on_enum = parse_quote!(
            #[fault(from)]
            enum E {
                A(B),
            }
        );
        assert_eq!(messages(&on_enum), "`from` belongs to a variant, not to the enum");
        let without_field = parse_quote!(
            #[fault(from)]
            struct S;
        );
        assert_eq!(messages(&without_field), "`S` has 0 fields: write `from = FIELD`");
        let union = parse_quote!(
            union U {
                a: u8,
            }
        );
        assert_eq!(messages(&union), "`Fault` cannot be derived for a union");
    }

    #[test]
    fn a_comma_in_a_value_does_not_end_it() {
        let input = parse_quote!(
            #[fault(exit = first::<A, B>(), hint = "a",)]
            #[fault(reason = "b")]
            struct S;
        );
        let code = assert_valid(&input);
        assert!(code.contains("first :: < A , B > ()"), "{code}");
    }

    #[test]
    fn a_generic_type_keeps_its_bounds() {
        let input = parse_quote!(
            #[fault(from = cause)]
            struct S<'a, T: Fault>
            where
                T: Copy,
            {
                cause: T,
                place: &'a str,
            }
        );
        let code = assert_valid(&input);
        let head = "impl < 'a , T : Fault > :: fault :: Fault for S < 'a , T > where T : Copy";
        assert!(code.contains(head), "{code}");
    }
}
