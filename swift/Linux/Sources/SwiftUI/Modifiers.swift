import Foundation

public protocol ShapeStyle {}
public protocol Shape {}
public protocol TextFieldStyle {}
public protocol LabelStyle {}
public protocol TextSelectability {}

public struct Color: ShapeStyle, Sendable {
    public static let accentColor = Self()
    public static let clear = Self()

    public func opacity(_ opacity: Double) -> Color { self }
}

extension ShapeStyle where Self == Color {
    public static var red: Color { Color() }
}

public struct RoundedRectangle: Shape {}

extension Shape where Self == RoundedRectangle {
    public static func rect(cornerRadius: CGFloat) -> Self { Self() }
}

public struct RoundedBorderTextFieldStyle: TextFieldStyle {}

extension TextFieldStyle where Self == RoundedBorderTextFieldStyle {
    public static var roundedBorder: Self { Self() }
}

public struct IconOnlyLabelStyle: LabelStyle {}

extension LabelStyle where Self == IconOnlyLabelStyle {
    public static var iconOnly: Self { Self() }
}

public struct EnabledTextSelectability: TextSelectability {}

extension TextSelectability where Self == EnabledTextSelectability {
    public static var enabled: Self { Self() }
}

public struct Font: Sendable {
    public static let caption = Self()
    public static let caption2 = Self()

    public func monospaced() -> Font { self }
    public func monospacedDigit() -> Font { self }
}

extension View {
    public func padding(_ length: CGFloat? = nil) -> some View { self }
    public func foregroundStyle<S: ShapeStyle>(_ style: S) -> some View { self }
    public func background<S: ShapeStyle, T: Shape>(_ style: S, in shape: T) -> some View { self }
    public func defaultScrollAnchor(_ anchor: UnitPoint?) -> some View { self }
    public func textFieldStyle<S: TextFieldStyle>(_ style: S) -> some View { self }
    public func labelStyle<S: LabelStyle>(_ style: S) -> some View { self }
    public func textSelection<S: TextSelectability>(_ selectability: S) -> some View { self }
    public func disabled(_ disabled: Bool) -> some View { self }
    public func font(_ font: Font?) -> some View { self }
    public func accessibilityLabel(_ label: LocalizedStringKey) -> some View { self }
    public func frame(height: CGFloat?) -> some View { self }
    public func frame(maxWidth: CGFloat?, alignment: Alignment) -> some View { self }
    public func tabItem(@ViewBuilder _ label: () -> Content) -> some View { self }

    public func task(
        @_inheritActorContext _ action: @escaping @Sendable () async -> Void
    ) -> some View { self }

    public func onChange<V: Equatable>(of value: V, _ action: @escaping () -> Void) -> some View {
        self
    }
}
