import SwiftUI

/// The chat, with what it remembers above it.
struct ChatView: View {
    @State private var chat = Chat()
    @State private var draft = ""

    var body: some View {
        VStack(spacing: 12) {
            if let problem = chat.problem { Text(problem).foregroundStyle(.red) }
            if let frame = chat.frame { MemoryView(frame: frame) }
            ScrollView {
                LazyVStack(alignment: .leading, spacing: 8) {
                    ForEach(chat.messages) { message in
                        Text(message.text)
                            .padding(10)
                            .background(
                                message.isUser ? Color.accentColor.opacity(0.2) : .clear,
                                in: .rect(cornerRadius: 12))
                    }
                }
            }
            .defaultScrollAnchor(.bottom)
            HStack(alignment: .bottom) {
                // Of several lines, so that the return key begins the next one.
                TextField("Message", text: $draft, axis: .vertical)
                    .textFieldStyle(.roundedBorder)
                Button("Send", systemImage: "arrow.up.circle.fill", action: send)
                    .labelStyle(.iconOnly)
                    .disabled(draft.isEmpty || chat.isAnswering)
            }
        }
        .padding()
        .task { await chat.load() }
    }

    private func send() {
        let text = draft
        draft = ""
        Task { await chat.send(text) }
    }
}
