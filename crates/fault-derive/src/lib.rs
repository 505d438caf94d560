//! Derives the trait `Fault` of the crate `fault`, which describes the attribute.

use proc_macro2::{Ident, TokenStream, TokenTree};
use quote::{format_ident, quote};
use syn::parse::{Parse, ParseStream};
use syn::{Attribute, Data, DeriveInput, Error, Fields, LitStr, Result, Token};

/// See the crate `fault`.
#[proc_macro_derive(Fault, attributes(fault))]
pub fn derive(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = syn::parse_macro_input!(input as DeriveInput);
    expand(&input).unwrap_or_else(Error::into_compile_error).into()
}

/// The content of `#[fault(..)]`.
#[derive(Default)]
struct Settings {
    exit: Option<TokenStream>,
    hint: Option<TokenStream>,
    reason: Option<TokenStream>,
    /// Empty for the first field.
    from: Option<TokenStream>,
}

impl Settings {
    fn of(attributes: &[Attribute]) -> Result<Self> {
        let mut settings = Self::default();
        for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("fault")) {
            let given: Self = attribute.parse_args()?;
            settings = given.or(settings);
        }
        Ok(settings)
    }

    /// These settings, and those of `other` that are missing here.
    fn or(self, other: Self) -> Self {
        Self {
            exit: self.exit.or(other.exit),
            hint: self.hint.or(other.hint),
            reason: self.reason.or(other.reason),
            from: self.from.or(other.from),
        }
    }
}

impl Parse for Settings {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let mut settings = Self::default();
        while !input.is_empty() {
            let key: Ident = input.parse()?;
            let mut value = TokenStream::new();
            if input.parse::<Option<Token![=]>>()?.is_some() {
                while !input.is_empty() && !input.peek(Token![,]) {
                    value.extend([input.parse::<TokenTree>()?]);
                }
            }
            input.parse::<Option<Token![,]>>()?;
            let setting = match key.to_string().as_str() {
                "exit" => &mut settings.exit,
                "hint" => &mut settings.hint,
                "reason" => &mut settings.reason,
                "from" => &mut settings.from,
                _ => {
                    let expected = "expected `exit`, `hint`, `reason` or `from`";
                    return Err(Error::new(key.span(), expected));
                }
            };
            *setting = Some(value);
        }
        Ok(settings)
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
    fn new(
        name: &Ident,
        path: &TokenStream,
        fields: &Fields,
        own: Settings,
        all: &Settings,
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
        let from = match own.from {
            Some(field) if field.is_empty() => {
                let first = names.first();
                let first = first.ok_or_else(|| Error::new(name.span(), "there is no field"))?;
                Some(quote!(#first))
            }
            from => from,
        };
        // What an attribute of the enum says holds only for variants that wrap no other error.
        let value = |own: Option<TokenStream>, all: &Option<TokenStream>| {
            own.or_else(|| all.clone().filter(|_| from.is_none()))
        };
        let function = |name: &str| {
            let name = format_ident!("{name}");
            from.as_ref().map(|from| quote!({ use ::fault::Fault as _; #from.#name() }))
        };
        let none = || quote!(::core::option::Option::None);
        let exit =
            value(own.exit, &all.exit).map(|value| exit(&value)).or_else(|| function("exit"));
        let hint =
            value(own.hint, &all.hint).map(|value| hint(&value)).or_else(|| function("hint"));
        Ok(Self {
            name: name.clone(),
            has_own_reason: own.reason.is_some(),
            pattern,
            exit: exit.unwrap_or_else(none),
            hint: hint.unwrap_or_else(none),
            reason: value(own.reason, &all.reason).or_else(|| function("reason")),
        })
    }
}

/// A name alone is a variant of `Exit`.
fn exit(value: &TokenStream) -> TokenStream {
    match syn::parse2::<Ident>(value.clone()) {
        Ok(name) if name == "None" => quote!(::core::option::Option::None),
        Ok(variant) => quote!(::core::option::Option::Some(::fault::Exit::#variant)),
        Err(_) => quote!(::core::convert::Into::into(#value)),
    }
}

fn hint(value: &TokenStream) -> TokenStream {
    match syn::parse2::<LitStr>(value.clone()) {
        Ok(text) if text.value().contains(['{', '}']) => {
            quote!(::fault::IntoHint::into_hint(::std::format!(#text)))
        }
        _ => quote!(::fault::IntoHint::into_hint(#value)),
    }
}

fn expand(input: &DeriveInput) -> Result<TokenStream> {
    let all = Settings::of(&input.attrs)?;
    let mut arms = Vec::new();
    match &input.data {
        Data::Enum(of) => {
            for variant in &of.variants {
                let (name, own) = (&variant.ident, Settings::of(&variant.attrs)?);
                arms.push(Arm::new(name, &quote!(Self::#name), &variant.fields, own, &all)?);
            }
        }
        Data::Struct(of) => {
            arms.push(Arm::new(
                &input.ident,
                &quote!(Self),
                &of.fields,
                all,
                &Settings::default(),
            )?);
        }
        Data::Union(_) => return Err(Error::new(input.ident.span(), "a union is no error")),
    }
    let has_reason = arms.iter().any(|arm| arm.has_own_reason);
    if let Some(arm) = arms.iter().find(|arm| has_reason && arm.reason.is_none()) {
        return Err(Error::new(arm.name.span(), "this variant has no `reason`, but others do"));
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
    Ok(quote! {
        #[automatically_derived]
        #[allow(unused_variables, clippy::all, clippy::pedantic)]
        impl ::fault::Fault for #name {
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
