@_exported import Foundation

/// What swift/Examples/ChatApp uses of SwiftUI, for the compiler alone: nothing is drawn.
@MainActor @preconcurrency public protocol View {
    associatedtype Body: View
    @ViewBuilder @MainActor var body: Body { get }
}

public protocol PrimitiveView: View where Body == Content {}

extension PrimitiveView {
    public var body: Content { Content() }
}

/// Whatever a builder made.
public struct Content: View {
    public var body: Content { self }
}

@resultBuilder public enum ViewBuilder {
    public static func buildBlock<each V: View>(_ views: repeat each V) -> Content { Content() }
    public static func buildOptional(_ view: Content?) -> Content { Content() }
    public static func buildEither(first: Content) -> Content { first }
    public static func buildEither(second: Content) -> Content { second }
}

public struct HorizontalAlignment: Sendable { public static let leading = Self() }
public struct VerticalAlignment: Sendable { public static let bottom = Self() }
public struct Alignment: Sendable { public static let leading = Self() }
public struct UnitPoint: Sendable { public static let bottom = Self() }
public enum Axis { case horizontal, vertical }

public struct VStack: PrimitiveView {
    public init(
        alignment: HorizontalAlignment = .leading, spacing: CGFloat? = nil,
        @ViewBuilder content: () -> Content
    ) {}
}

public struct LazyVStack: PrimitiveView {
    public init(
        alignment: HorizontalAlignment = .leading, spacing: CGFloat? = nil,
        @ViewBuilder content: () -> Content
    ) {}
}

public struct HStack: PrimitiveView {
    public init(
        alignment: VerticalAlignment = .bottom, spacing: CGFloat? = nil,
        @ViewBuilder content: () -> Content
    ) {}
}

public struct ScrollView: PrimitiveView {
    public init(@ViewBuilder content: () -> Content) {}
}

public struct TabView: PrimitiveView {
    public init(@ViewBuilder content: () -> Content) {}
}

public struct ForEach<Data: RandomAccessCollection>: PrimitiveView
where Data.Element: Identifiable {
    public init(_ data: Data, @ViewBuilder content: @escaping (Data.Element) -> Content) {}
}

public struct LocalizedStringKey: ExpressibleByStringInterpolation {
    public init(stringLiteral value: String) {}
    public init(stringInterpolation: StringInterpolation) {}

    public struct StringInterpolation: StringInterpolationProtocol {
        public init(literalCapacity: Int, interpolationCount: Int) {}
        public mutating func appendLiteral(_ literal: String) {}
        public mutating func appendInterpolation(_ value: Int) {}
        public mutating func appendInterpolation(_ value: Double, specifier: String) {}
    }
}

public struct Text: PrimitiveView {
    public init(_ key: LocalizedStringKey) {}
    @_disfavoredOverload public init<S: StringProtocol>(_ content: S) {}
    public init<F: FormatStyle>(_ input: F.FormatInput, format: F)
    where F.FormatInput: Equatable, F.FormatOutput == String {}
}

public struct Label: PrimitiveView {
    public init(_ title: LocalizedStringKey, systemImage: String) {}
}

public struct TextField: PrimitiveView {
    public init(_ title: LocalizedStringKey, text: Binding<String>, axis: Axis) {}
}

public struct Button: PrimitiveView {
    public init(_ title: LocalizedStringKey, action: @escaping @MainActor () -> Void) {}
    public init(
        _ title: LocalizedStringKey, systemImage: String, action: @escaping @MainActor () -> Void
    ) {}
}

public struct ShareLink: PrimitiveView {
    public init(item: String) {}
}

public struct ProgressView: PrimitiveView {
    public init() {}
}

public struct Spacer: PrimitiveView {
    public init() {}
}

public struct Path {
    public init(_ rect: CGRect) {}
}

public struct GraphicsContext {
    public struct Shading {
        public static func color(_ color: Color) -> Self { Self() }
    }

    public func fill(_ path: Path, with shading: Shading) {}
}

public struct Canvas: PrimitiveView {
    public init(renderer: @escaping (inout GraphicsContext, CGSize) -> Void) {}
}
